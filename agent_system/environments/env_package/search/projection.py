# SPDX-License-Identifier: Apache-2.0
"""Model text -> query or answer. The rules follow published runs, so that their numbers stay comparable."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["search_projection"]

_KINDS = ("search", "answer")
_BLOCKS = {kind: re.compile(f"<{kind}>(.*?)</{kind}>", re.IGNORECASE | re.DOTALL) for kind in _KINDS}


def search_projection(actions: Sequence[str]) -> tuple[list[str], list[int]]:
    """`<search>...</search>` or `<answer>...</answer>` of each model text, and 0/1 format flags; never raises.

    The text is cut after its first `</search>`, else after its first `</answer>` (lower case). The first search block,
    else the first answer block, is the action, stripped; without any it is empty and invalid. A text with both kinds of
    tag, or with two of one kind, is invalid.
    """
    projected = [_project(text) for text in actions]
    return [action for action, _ in projected], [int(valid) for _, valid in projected]


def _project(text: str) -> tuple[str, bool]:
    counts = [text.lower().count(f"<{kind}>") for kind in _KINDS]
    head = text
    for kind in _KINDS:
        before, close, _ = text.partition(f"</{kind}>")
        if close:
            head = before + close
            break
    for kind in _KINDS:
        block = _BLOCKS[kind].search(head)
        if block is not None:
            return f"<{kind}>{block.group(1).strip()}</{kind}>", sum(counts) == 1
    return "", False
