# SPDX-License-Identifier: Apache-2.0
"""Model text -> move number. The rules follow published runs, so that their numbers stay comparable."""

from __future__ import annotations

from collections.abc import Sequence

from agent_system.environments.projection import project_tagged_action

__all__ = ["MOVES", "sokoban_projection"]

MOVES = {"up": 1, "down": 2, "left": 3, "right": 4, "still": 0}


def sokoban_projection(
    actions: Sequence[str], action_pools: Sequence[Sequence[str]] | None = None
) -> tuple[list[int], list[int]]:
    """Move numbers (see `MOVES`) of a list of model texts and 0/1 format flags; the input is not changed.

    The first of `MOVES` contained in the tagged action counts (see `project_tagged_action`); without tags or a move the
    number is 0 and the flag 0.

    Args:
        actions: model texts.
        action_pools: accepted for old callers, not read.
    """
    projected = [_project(text) for text in actions]
    return [move for move, _ in projected], [int(valid) for _, valid in projected]


def _project(text: str) -> tuple[int, bool]:
    lowered = text.lower()
    if "<action>" not in lowered or "</action>" not in lowered:
        return MOVES["still"], False
    action, valid = project_tagged_action(text, fallback_chars=1)
    for name, number in MOVES.items():
        if name in action:
            return number, valid
    return MOVES["still"], False
