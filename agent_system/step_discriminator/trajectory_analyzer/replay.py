# SPDX-License-Identifier: Apache-2.0
"""Replaying shortened trajectories: every deletion answered exactly, most of them without playing the whole game.

Works on any object with `reset`, `step`, `snapshot`, `restore` and `state_key` in which the future depends only on
the state behind `state_key` and on the actions still to come. Three things make it cheap and none changes a label:

* the state before step i is the original run's, so a deletion starts from a snapshot of that prefix;
* a run whose (state, remaining actions) pair was seen before, in the original or in another deletion, must end the
  same way, so it stops there;
* remaining action lists are hash-consed, so that comparing two of them is comparing two integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "Ablation",
    "OriginalRun",
    "ReplayableGame",
    "Replayer",
    "SuccessTest",
    "replay_naively",
    "reported_won",
]


class ReplayableGame(Protocol):
    """What the analysis needs of an environment."""

    @property
    def state_key(self) -> str:
        """Equal keys mean: equal reaction to every sequence of actions."""

    def reset(self) -> tuple[str, Mapping[str, Any]]:
        """Start from the beginning of the task; observation and info."""

    def step(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Observation, reward, done, info; any text is accepted."""

    def snapshot(self) -> object:
        """The present state, to be handed to `restore` of the same object."""

    def restore(self, snapshot: Any) -> object:
        """Continue from a snapshot."""


SuccessTest = Callable[[float, bool, Mapping[str, Any]], bool]
"""(reward, done, info) of one step -> the task is solved."""


def reported_won(reward: float, done: bool, info: Mapping[str, Any]) -> bool:
    """Success as the environment itself reports it in `info["won"]`."""
    return bool(info["won"])


@dataclass(frozen=True)
class Ablation:
    """How a run ends."""

    success: bool
    steps: int
    """Actions taken up to the first success, or up to the end (episode over or actions used up)."""
    rejoins: bool
    """The run came back to a state of the original run with the same actions left: what was deleted left no trace."""


@dataclass(frozen=True)
class OriginalRun:
    """The replay of the whole trajectory, cut where it first succeeds or the episode ends."""

    actions: tuple[str, ...]
    success: bool
    keys: tuple[str, ...]
    """State keys before action 0, ..., before action T-1, and after the last: T + 1 entries."""
    observations: tuple[str, ...]
    """What the environment answered: after reset and after each action, T + 1 entries."""


class Replayer:
    """Answers "does it still succeed without these steps?" for one trajectory in one game.

    `env_steps_used`, `env_steps_naive` and `replays` count what was done so far; the naive number is what the same
    questions cost when each is answered by a replay from the start that stops at its first success.
    """

    def __init__(self, game: ReplayableGame, actions: Sequence[str], is_success: SuccessTest = reported_won) -> None:
        self._game = game
        self._is_success = is_success
        self._chain_ids: dict[tuple[str, int], int] = {}
        self._outcomes: dict[tuple[str, int], Ablation] = {}
        self.replays = 0
        self.env_steps_used = 0
        self.env_steps_naive = 0
        self._snapshots: list[object] = []
        self.original = self._run_original(actions)

    def _run_original(self, actions: Sequence[str]) -> OriginalRun:
        game = self._game
        observation, _ = game.reset()
        keys, observations = [game.state_key], [observation]
        self._snapshots.append(game.snapshot())
        success = False
        for action in actions:
            observation, reward, done, info = game.step(action)
            keys.append(game.state_key)
            observations.append(observation)
            self._snapshots.append(game.snapshot())
            success = self._is_success(reward, done, info)
            if success or done:
                break
        taken = len(keys) - 1
        self.replays += 1
        self.env_steps_used += taken
        self.env_steps_naive += taken
        run = OriginalRun(tuple(actions[:taken]), success, tuple(keys), tuple(observations))
        for position, chain in enumerate(self._chain(run.actions)[:-1]):
            self._outcomes[keys[position], chain] = Ablation(success, taken - position, True)
        return run

    def _chain(self, actions: Sequence[str]) -> list[int]:
        """Ids of actions[0:], actions[1:], ..., the empty list (id 0); equal ids mean equal lists."""
        ids = [0] * (len(actions) + 1)
        for position in range(len(actions) - 1, -1, -1):
            link = (actions[position], ids[position + 1])
            ids[position] = self._chain_ids.setdefault(link, len(self._chain_ids) + 1)
        return ids

    def without(self, step_index: int) -> Ablation:
        """The run without one step. `steps` counts from the start of the task."""
        total = len(self.original.actions)
        return self.keep([index for index in range(total) if index != step_index])

    def keep(self, indices: Sequence[int]) -> Ablation:
        """The run of the steps `indices` (ascending) of the original, from the start of the task."""
        # The shared prefix stops before the original's last step, which may be the one that wins.
        limit = min(len(indices), len(self.original.actions) - 1)
        prefix = 0
        while prefix < limit and indices[prefix] == prefix:
            prefix += 1
        remaining = [self.original.actions[index] for index in indices[prefix:]]
        outcome = self._play_from(prefix, remaining)
        result = Ablation(outcome.success, prefix + outcome.steps, outcome.rejoins)
        self.replays += 1
        self.env_steps_naive += result.steps
        return result

    def _play_from(self, prefix: int, actions: Sequence[str]) -> Ablation:
        """Play `actions` from the original's state before step `prefix`; remembers every state passed."""
        game = self._game
        chain = self._chain(actions)
        key = self.original.keys[prefix]
        passed: list[tuple[str, int]] = []
        restored = False
        while True:
            node = (key, chain[len(passed)])
            outcome = self._outcomes.get(node)
            if outcome is not None:
                break
            if len(passed) == len(actions):
                outcome = Ablation(False, 0, False)
                break
            if not restored:
                game.restore(self._snapshots[prefix])
                restored = True
            _, reward, done, info = game.step(actions[len(passed)])
            self.env_steps_used += 1
            passed.append(node)
            key = game.state_key
            success = self._is_success(reward, done, info)
            if success or done:
                outcome = self._ending(key, chain[len(passed)], success)
                break
        for node in reversed(passed):
            outcome = Ablation(outcome.success, outcome.steps + 1, outcome.rejoins)
            self._outcomes[node] = outcome
        return outcome

    def _ending(self, key: str, chain: int, success: bool) -> Ablation:
        same = chain == 0 and key == self.original.keys[-1] and success == self.original.success
        return Ablation(success, 0, same)


def replay_naively(
    game: ReplayableGame, actions: Sequence[str], is_success: SuccessTest = reported_won
) -> tuple[bool, int]:
    """Play `actions` from the start, stopping at the first success: (success, actions taken).

    The reference that `Replayer` must agree with, action list by action list.
    """
    game.reset()
    for taken, action in enumerate(actions, start=1):
        _, reward, done, info = game.step(action)
        success = is_success(reward, done, info)
        if success or done:
            return success, taken
    return False, len(actions)
