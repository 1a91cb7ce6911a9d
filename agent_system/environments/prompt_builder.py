# SPDX-License-Identifier: Apache-2.0
"""What the prompt builders of all environments share: style, how much history, and when to show less of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from agent_system.memory.memory import format_action_history
from verl.utils.errors import UserError

__all__ = ["STYLES", "PromptBuilder", "Turn"]

STYLES = ("full", "compact")

Turn = tuple[str, str]
"""A past observation and the action taken on it."""


class PromptBuilder(ABC):
    """Builds the user message of one turn: a pure function of the episode.

    `full` has instructions, for pretrained models; `compact` has none, for a policy that is trained on it. Task,
    current observation and offered actions are in every message, whatever the history shown.
    """

    style_key: ClassVar[str]
    """Config key of the style, for messages."""

    def __init__(self, style: str, history_length: int) -> None:
        """
        Args:
            style: `full` or `compact`.
            history_length: past turns shown; <= 0 shows none.

        Raises:
            UserError: another style.
        """
        if style not in STYLES:
            raise UserError(f"{self.style_key}={style}: choose full or compact.")
        self.style = style
        self.history_length = max(history_length, 0)

    def build(
        self,
        task_text: str,
        history: Sequence[Turn],
        obs: str,
        admissible: Sequence[str],
        max_history: int | None = None,
    ) -> str:
        """The message of one turn.

        Args:
            task_text: the task, in the environment's own words.
            history: all past (observation, action) pairs, oldest first; empty at the first turn.
            obs: current observation.
            admissible: actions offered now.
            max_history: shows at most so many past turns instead of `history_length`.
        """
        limit = self.history_length if max_history is None else min(max_history, self.history_length)
        shown = min(max(limit, 0), len(history))
        write = self.compact if self.style == "compact" else self.full
        return write(task_text, history, shown, obs, admissible)

    @abstractmethod
    def full(self, task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
        """The message with instructions, and the last `shown` turns of the history."""

    @abstractmethod
    def compact(self, task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
        """The message without instructions, and the last `shown` turns of the history."""

    @staticmethod
    def history_fields(task: str, history: Sequence[Turn], shown: int) -> dict[str, Any]:
        """What the templates with a history say of it: task, steps taken, the turns shown, number of this step."""
        return {
            "task_description": task,
            "step_count": len(history),
            "history_length": shown,
            "action_history": format_action_history(history, shown),
            "current_step": len(history) + 1,
        }
