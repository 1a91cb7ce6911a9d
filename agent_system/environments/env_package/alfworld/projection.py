# SPDX-License-Identifier: Apache-2.0
"""Model text -> ALFWorld command. The rules follow published runs, so that their numbers stay comparable."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["alfworld_projection", "project_tagged_action"]

_OPEN, _CLOSE = "<action>", "</action>"
_FALLBACK_CHARS = 30


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


def alfworld_projection(
    actions: Sequence[str], action_pools: Sequence[Sequence[str]] | None = None
) -> tuple[list[str], list[int]]:
    """Commands and 0/1 format flags of a list of model texts (see `project_tagged_action`); the input is not changed.

    Args:
        actions: model texts.
        action_pools: accepted for old callers; admissibility is the environment's business and not checked here.
    """
    projected = [project_tagged_action(text, _FALLBACK_CHARS) for text in actions]
    return [action for action, _ in projected], [int(valid) for _, valid in projected]
