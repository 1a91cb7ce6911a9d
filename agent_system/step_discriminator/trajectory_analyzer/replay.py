# SPDX-License-Identifier: Apache-2.0
"""Replaying shortened trajectories: every deletion answered exactly, most of them without playing the whole game.

The future of a `ReplayableGame` depends only on its state and on the actions to come, which is used three times and
changes no label:

* the state before step i is the original run's, so a deletion starts there and only its rest is played;
* a run that comes to a (state, remaining actions) pair seen before, in the original or in another deletion, ends the
  same way, so it stops there;
* an action taken before in a state is looked up, not taken again: the environment steps each (state, action) once.

States and remaining action lists are numbered as they come up, so that comparing them is comparing integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from agent_system.step_discriminator.trajectory_analyzer.adapters import (
    ReplayableGame,
    ScoreTest,
    StateId,
    won_score,
)

__all__ = ["Ablation", "OriginalRun", "Replayer", "Tape", "replay_naively"]


@dataclass(frozen=True)
class Ablation:
    """How a run ends."""

    success: bool
    steps: int
    """Actions taken up to the first success, or up to the end (episode over or actions used up)."""
    rejoins: bool
    """It ends in the state where the run that it was cut from ends, by the same last actions: what was deleted left no
    trace."""


@dataclass(frozen=True)
class OriginalRun:
    """The replay of the whole trajectory, cut where it first succeeds or the episode ends."""

    actions: tuple[str, ...]
    success: bool
    score: float
    """Score of the last step, in [0, 1]; 0.0 without any."""
    states: tuple[int, ...]
    """Numbers of the states before action 0, ..., before action T-1, and after the last: T + 1 entries. Equal numbers
    are equal states."""
    observations: tuple[str, ...]
    """What the environment answered: after reset and after each action, T + 1 entries."""


@dataclass(frozen=True)
class Tape:
    """Steps of the original that were played in a row; all but the last are known not to succeed."""

    indices: tuple[int, ...]
    """Of the original's steps, ascending."""
    actions: tuple[int, ...]
    """Their numbers."""
    rests: tuple[int, ...]
    """Numbers of the lists actions[0:], actions[1:], ..., the empty list; one entry more than `actions`."""
    states: tuple[int, ...]
    """As in `OriginalRun`."""
    success: bool


class _Outcome(NamedTuple):
    success: bool
    steps: int
    end: int
    """Number of the last state."""


_GOES_ON, _ENDS, _SUCCEEDS = 0, 1, 2


class Replayer:
    """Answers "does it still succeed without these steps?" for one trajectory in one game.

    `replays`, `env_steps_used` and `env_steps_naive` count what was done so far; the naive number is what the same
    questions cost when each is answered by a replay from the start that stops at its first success.

    Args:
        game: used by nobody else while this lives.
        actions: of the trajectory.
        score: of one step, in [0, 1].
        threshold: the original is cut at its first step with at least this score. Deletions must reach the score of
            that step (`threshold` where there was none).
        state_id: identifies the state of `game`.
    """

    def __init__(
        self,
        game: ReplayableGame,
        actions: Sequence[str],
        score: ScoreTest = won_score,
        threshold: float = 1.0,
        state_id: StateId = attrgetter("state_key"),
    ) -> None:
        self._game = game
        self._score = score
        self._state_id = state_id
        self._bar = threshold
        self._last_score = 0.0
        self._numbers: dict[Any, int] = {}
        self._snapshots: list[Any] = []
        self._moves: list[dict[int, tuple[int, int]]] = []
        self._here = -1
        """State the game is in now; -1: unknown or over."""
        self._action_numbers: dict[str, int] = {}
        self._action_texts: list[str] = []
        self._rest_numbers: dict[tuple[int, int], int] = {}
        self._outcomes: dict[tuple[int, int], _Outcome] = {}
        self.replays = 0
        self.env_steps_used = 0
        self.env_steps_naive = 0
        self.original = self._run_original(actions)
        self.whole = self._tape(tuple(range(len(self.original.actions))))
        """The original as a tape."""
        if self.original.success:
            self._bar = self.original.score

    # ---- states and moves

    def _arrive(self) -> int:
        """Number of the state the game is in; a new one is kept for `restore`."""
        number = self._numbers.setdefault(self._state_id(self._game), len(self._snapshots))
        if number == len(self._snapshots):
            self._snapshots.append(self._game.snapshot())
            self._moves.append({})
        return number

    def _number_of(self, action: str) -> int:
        number = self._action_numbers.setdefault(action, len(self._action_texts))
        if number == len(self._action_texts):
            self._action_texts.append(action)
        return number

    def _take(self, state: int, action: int) -> tuple[int, int, str]:
        """Step the environment: (next state, verdict, observation)."""
        if self._here != state:
            self._game.restore(self._snapshots[state])
        observation, reward, done, info = self._game.step(self._action_texts[action])
        self.env_steps_used += 1
        self._last_score = self._score(reward, done, info)
        verdict = _SUCCEEDS if self._last_score >= self._bar else _ENDS if done else _GOES_ON
        after = self._arrive()
        self._here = -1 if done else after
        self._moves[state][action] = (after, verdict)
        return after, verdict, observation

    def _run_original(self, texts: Sequence[str]) -> OriginalRun:
        observation, _ = self._game.reset()
        self._here = self._arrive()
        states, observations = [self._here], [observation]
        verdict = _GOES_ON
        for text in texts:
            action = self._number_of(text)
            # Taken even where the move is known: observations are not remembered.
            after, verdict, observation = self._take(states[-1], action)
            states.append(after)
            observations.append(observation)
            if verdict != _GOES_ON:
                break
        taken = len(states) - 1
        self.replays += 1
        self.env_steps_naive += taken
        return OriginalRun(
            tuple(texts[:taken]), verdict == _SUCCEEDS, self._last_score, tuple(states), tuple(observations)
        )

    def _tape(self, indices: tuple[int, ...]) -> Tape:
        """Steps that are known to run to their end (their moves are remembered, nothing is stepped)."""
        actions = tuple(self._number_of(self.original.actions[index]) for index in indices)
        states, verdict = [self.original.states[0]], _GOES_ON
        for action in actions:
            after, verdict = self._moves[states[-1]][action]
            states.append(after)
        rests = [0] * (len(actions) + 1)
        for position in range(len(actions) - 1, -1, -1):
            link = (actions[position], rests[position + 1])
            rests[position] = self._rest_numbers.setdefault(link, len(self._rest_numbers) + 1)
        for position in range(len(actions)):
            node = (states[position], rests[position])
            self._outcomes[node] = _Outcome(verdict == _SUCCEEDS, len(actions) - position, states[-1])
        return Tape(indices, actions, tuple(rests), tuple(states), verdict == _SUCCEEDS)

    # ---- questions

    def without(self, removed: Sequence[int], tape: Tape | None = None) -> Ablation:
        """The run of a tape (default: the original) without the steps at the positions `removed`.

        Args:
            removed: ascending positions in the tape, at least one.

        Returns:
            How it ends; `steps` counts from the start of the task.
        """
        base = self.whole if tape is None else tape
        outcome = self._play(base, removed)
        self.replays += 1
        self.env_steps_naive += outcome.steps
        same = (
            outcome.end == base.states[-1]
            and outcome.success == base.success
            and outcome.steps == len(base.actions) - len(removed)
        )
        return Ablation(outcome.success, outcome.steps, same)

    def shortened(self, removed: Sequence[int], tape: Tape) -> Tape:
        """The tape without steps whose removal `without` found to succeed, cut at that success."""
        gone = set(removed)
        kept = [index for position, index in enumerate(tape.indices) if position not in gone]
        return self._tape(tuple(kept[: self._play(tape, removed).steps]))

    def keep(self, indices: Sequence[int]) -> Ablation:
        """The run of the original's steps `indices` (ascending), from the start of the task."""
        kept = set(indices)
        removed = [index for index in range(len(self.original.actions)) if index not in kept]
        if removed:
            return self.without(removed)
        total = len(self.original.actions)
        self.replays += 1
        self.env_steps_naive += total
        return Ablation(self.original.success, total, True)

    def _play(self, tape: Tape, removed: Sequence[int]) -> _Outcome:
        first, last = removed[0], removed[-1]
        state, steps = tape.states[first], first
        if last - first >= len(removed):  # not in a row
            gone = set(removed)
            for position in range(first + 1, last):
                if position in gone:
                    continue
                action = tape.actions[position]
                move = self._moves[state].get(action)
                state, verdict = move if move is not None else self._take(state, action)[:2]
                steps += 1
                if verdict != _GOES_ON:
                    return _Outcome(verdict == _SUCCEEDS, steps, state)
        outcome = self._play_rest(state, tape, last + 1)
        return _Outcome(outcome.success, steps + outcome.steps, outcome.end)

    def _play_rest(self, state: int, tape: Tape, position: int) -> _Outcome:
        """From `state` the tape's steps from `position` on; every (state, rest) passed is remembered."""
        passed: list[tuple[int, int]] = []
        verdict = _GOES_ON
        while True:
            node = (state, tape.rests[position])
            outcome = self._outcomes.get(node)
            if outcome is not None:
                break
            if position == len(tape.actions):
                outcome = _Outcome(False, 0, state)
                break
            passed.append(node)
            action = tape.actions[position]
            move = self._moves[state].get(action)
            state, verdict = move if move is not None else self._take(state, action)[:2]
            position += 1
            if verdict != _GOES_ON:
                outcome = _Outcome(verdict == _SUCCEEDS, 0, state)
                break
        success, steps, end = outcome
        for node in reversed(passed):
            steps += 1
            self._outcomes[node] = _Outcome(success, steps, end)
        return outcome if not passed else self._outcomes[passed[0]]


def replay_naively(
    game: ReplayableGame, actions: Sequence[str], score: ScoreTest = won_score, threshold: float = 1.0
) -> tuple[bool, int]:
    """Play `actions` from the start, stopping at the first success: (success, actions taken).

    The reference that `Replayer` must agree with, action list by action list.
    """
    game.reset()
    for taken, action in enumerate(actions, start=1):
        _, reward, done, info = game.step(action)
        success = score(reward, done, info) >= threshold
        if success or done:
            return success, taken
    return False, len(actions)
