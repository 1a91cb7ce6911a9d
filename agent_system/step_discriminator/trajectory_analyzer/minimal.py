# SPDX-License-Identifier: Apache-2.0
"""The evolved trajectory: a verified shorter success, found by removing steps greedily."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from agent_system.step_discriminator.trajectory_analyzer.replay import Replayer, Tape

__all__ = ["Evolved", "evolve"]


@dataclass(frozen=True)
class Evolved:
    """What is left of a success."""

    indices: tuple[int, ...]
    """Steps of the original that are kept, ascending; played alone they succeed at the last one and not before."""
    undone: frozenset[int]
    """Removed steps that left no trace: without them the run came back to the states it had with them."""


def evolve(replayer: Replayer, *, joint: bool) -> Evolved:
    """Remove steps of a successful original, each removal verified together with those before it.

    Single-step labels are not jointly safe: two steps that can each go may not both go, and a take and its put-back
    are each necessary but can go together. First single steps go, last first, until none can. With `joint`, then runs
    of neighbouring steps, longest first, and pairs of steps at any distance; after each such removal single steps are
    tried again. All pairs are tried, so nothing has to know which commands match (take and put back, open and close,
    click and back).

    Returns:
        With `joint` a success from which neither a step, nor a pair, nor a run can be removed; without it one from
        which no single step can.
    """
    tape = replayer.whole
    undone: set[int] = set()
    found = True
    while found:
        tape = _drop_singles(replayer, tape, undone)
        found = False
        for removed in _joint_candidates(len(tape.indices)) if joint else ():
            outcome = replayer.without(removed, tape)
            if outcome.success:
                if outcome.rejoins:
                    undone.update(tape.indices[position] for position in removed)
                tape = replayer.shortened(removed, tape)
                found = True
                break
    return Evolved(tape.indices, frozenset(undone))


def _drop_singles(replayer: Replayer, tape: Tape, undone: set[int]) -> Tape:
    changed = True
    while changed:
        changed = False
        position = len(tape.indices) - 1
        while position >= 0:
            outcome = replayer.without((position,), tape)
            if outcome.success:
                if outcome.rejoins:
                    undone.add(tape.indices[position])
                tape = replayer.shortened((position,), tape)
                changed = True
            position = min(position, len(tape.indices)) - 1
    return tape


def _joint_candidates(length: int) -> Iterator[tuple[int, ...]]:
    """Runs of at least two neighbours, longest first, then pairs that are no neighbours."""
    for size in range(length - 1, 1, -1):
        for start in range(length - size + 1):
            yield tuple(range(start, start + size))
    for first, second in combinations(range(length), 2):
        if second > first + 1:
            yield (first, second)
