# SPDX-License-Identifier: Apache-2.0
"""ALFWorld prompts as a pure function, used by the environment manager and by SFT data."""

from __future__ import annotations

from collections.abc import Sequence

from agent_system.environments.prompt_builder import PromptBuilder, Turn
from agent_system.environments.prompts.alfworld import ALFWORLD_TEMPLATE, ALFWORLD_TEMPLATE_NO_HIS

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


class AlfworldPromptBuilder(PromptBuilder):
    """Builds the user message of one turn.

    `full`: instructions, the last `history_length` (observation, action) pairs, the observation and every admissible
    command. `compact`: task, the last `history_length` actions with what each led to (the last one led to the current
    observation), admissible commands, one a line, receptacles not visited yet first; about 80 tokens for a tokenizer
    trained on it. The task may come with or without `Your task is to: `; `help` is never offered.
    """

    style_key = "env.alfworld.prompt_style"

    def full(self, task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
        """See `PromptBuilder.full`."""
        task = _bare(task)
        admissible_actions = "\n ".join(f"'{command}'" for command in _commands(admissible))
        if shown == 0:
            # Only the first observation of an episode says what the task is.
            current = obs if TASK_MARKER in obs else f"{TASK_MARKER}{task}\n\n{obs}"
            return ALFWORLD_TEMPLATE_NO_HIS.format(current_observation=current, admissible_actions=admissible_actions)
        return ALFWORLD_TEMPLATE.format(
            **self.history_fields(task, history, shown),
            current_observation=obs,
            admissible_actions=admissible_actions,
        )

    def compact(self, task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
        """See `PromptBuilder.compact`."""
        outcomes = [past for past, _ in history[1:]] + [obs]
        start = len(history) - shown
        lines = [f"Task: {_bare(task)}"]
        for (_, action), outcome in zip(history[start:], outcomes[start:]):
            lines += [f">{action}", outcome]
        if shown == 0:
            lines.append(_opening(obs))
        lines += ["Commands:", *unvisited_first(_commands(admissible), history, obs)]
        return "\n".join(lines)


def _bare(task: str) -> str:
    return task.removeprefix(TASK_MARKER).strip()


def _commands(admissible: Sequence[str]) -> list[str]:
    return [command for command in admissible if command != "help"]


def _opening(obs: str) -> str:
    """A first observation without banner, task and receptacle list: the task line and the commands repeat them."""
    if TASK_MARKER not in obs:
        return obs
    before_task = obs.partition(TASK_MARKER)[0].strip()
    room = before_task.split("\n\n")[-1]
    return room.split(". ", 1)[0].rstrip(".") + "."
