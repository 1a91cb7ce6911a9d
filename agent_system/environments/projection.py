# SPDX-License-Identifier: Apache-2.0
"""Model text -> action, for environments whose actions stand between `<action>` tags."""

from __future__ import annotations

__all__ = ["project_tagged_action"]

_OPEN, _CLOSE = "<action>", "</action>"


def project_tagged_action(text: str, fallback_chars: int) -> tuple[str, bool]:
    """(action, valid) of one model text. Never raises.

    The action is what stands between the first `<action>` and the first `</action>` of the lowercased text, stripped;
    it may be empty (nothing between the tags, or the closing tag comes first) and may be anything the environment does
    not offer. Without both tags it is the last `fallback_chars` characters of the lowercased text. Valid means: both
    action tags in any case, both `<think>` and `</think>` in lower case anywhere, and no character of U+4E00..U+9FFF.
    """
    lowered = text.lower()
    start, end = lowered.find(_OPEN), lowered.find(_CLOSE)
    if start < 0 or end < 0:
        return lowered[-fallback_chars:], False
    action = lowered[start + len(_OPEN) : end].strip()
    valid = "<think>" in text and "</think>" in text and not any("\u4e00" <= char <= "\u9fff" for char in text)
    return action, valid
