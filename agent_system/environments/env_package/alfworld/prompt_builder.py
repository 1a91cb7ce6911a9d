# SPDX-License-Identifier: Apache-2.0
"""ALFWorld prompts as a pure function, used by the environment manager and by SFT data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agent_system.environments.prompts.alfworld import ALFWORLD_TEMPLATE, ALFWORLD_TEMPLATE_NO_HIS
from agent_system.memory.memory import format_action_history
from verl.utils.errors import UserError

__all__ = ["TASK_MARKER", "AlfworldPromptBuilder", "extract_task", "unvisited_first"]

TASK_MARKER = "Your task is to: "
_NO_EFFECT = "Nothing happens"
_GO = "go to "


def extract_task(observation: str) -> str:
    """The task sentence of a first observation: what follows `Your task is to: `.

    Raises:
        ValueError: the observation does not name a task.
    """
    _, marker, task = observation.partition(TASK_MARKER)
    if not marker:
        raise ValueError(f"no {TASK_MARKER!r} in the first observation: {observation[:200]!r}")
    return task.strip()


def unvisited_first(admissible: Sequence[str], history: Sequence[tuple[str, str]], observation: str) -> list[str]:
    """`admissible` with the `go to` commands of receptacles not visited yet first; the order is otherwise kept.

    Args:
        history: all past (observation, action) pairs of the episode.
        observation: what the last action led to.
    """
    outcomes = [obs for obs, _ in history[1:]] + [observation]
    visited = {action for (_, action), outcome in zip(history, outcomes) if not outcome.startswith(_NO_EFFECT)}
    fresh = [command for command in admissible if command.startswith(_GO) and command not in visited]
    known = set(fresh)
    return fresh + [command for command in admissible if command not in known]


class AlfworldPromptBuilder:
    """Builds the user message of one turn.

    `full`: instructions, the last `history_length` (observation, action) pairs, the observation and every admissible
    command, for pretrained models. `compact`: task, the last `history_length` actions with what each led to (the last
    one led to the current observation), admissible commands, one a line, receptacles not visited yet first; no
    instructions; about 80 tokens for a tokenizer trained on it.

    The task, the current observation and the admissible commands are in every prompt, whatever the history shown;
    `help` is never offered.
    """

    def __init__(self, style: Literal["full", "compact"], history_length: int) -> None:
        """
        Args:
            style: `env.alfworld.prompt_style`.
            history_length: past turns shown; <= 0 shows none.
        """
        if style not in ("full", "compact"):
            raise UserError(f"env.alfworld.prompt_style={style}: choose full or compact.")
        self.style = style
        self.history_length = max(history_length, 0)

    def build(
        self,
        task_text: str,
        history: Sequence[tuple[str, str]],
        obs: str,
        admissible: Sequence[str],
        max_history: int | None = None,
    ) -> str:
        """The message of one turn.

        Args:
            task_text: the task sentence, with or without `Your task is to: `.
            history: all past (observation, action) pairs, oldest first; empty at the first turn.
            obs: current observation.
            admissible: commands offered now.
            max_history: shows at most so many past turns instead of `history_length`.
        """
        limit = self.history_length if max_history is None else min(max_history, self.history_length)
        shown = min(max(limit, 0), len(history))
        task = task_text.removeprefix(TASK_MARKER).strip()
        commands = [command for command in admissible if command != "help"]
        if self.style == "compact":
            return _compact(task, history, shown, obs, commands)
        return _full(task, history, shown, obs, commands)


def _full(task: str, history: Sequence[tuple[str, str]], shown: int, obs: str, commands: Sequence[str]) -> str:
    admissible_actions = "\n ".join(f"'{command}'" for command in commands)
    if shown == 0:
        # Only the first observation of an episode says what the task is.
        current = obs if TASK_MARKER in obs else f"{TASK_MARKER}{task}\n\n{obs}"
        return ALFWORLD_TEMPLATE_NO_HIS.format(current_observation=current, admissible_actions=admissible_actions)
    return ALFWORLD_TEMPLATE.format(
        task_description=task,
        step_count=len(history),
        history_length=shown,
        action_history=format_action_history(history, shown),
        current_step=len(history) + 1,
        current_observation=obs,
        admissible_actions=admissible_actions,
    )


def _compact(task: str, history: Sequence[tuple[str, str]], shown: int, obs: str, commands: Sequence[str]) -> str:
    outcomes = [past for past, _ in history[1:]] + [obs]
    start = len(history) - shown
    lines = [f"Task: {task}"]
    for (_, action), outcome in zip(history[start:], outcomes[start:]):
        lines += [f">{action}", outcome]
    if shown == 0:
        lines.append(_opening(obs))
    lines += ["Commands:", *unvisited_first(commands, history, obs)]
    return "\n".join(lines)


def _opening(obs: str) -> str:
    """A first observation without banner, task and receptacle list: the task line and the commands repeat them."""
    if TASK_MARKER not in obs:
        return obs
    before_task = obs.partition(TASK_MARKER)[0].strip()
    room = before_task.split("\n\n")[-1]
    return room.split(". ", 1)[0].rstrip(".") + "."
