# SPDX-License-Identifier: Apache-2.0
"""Who plays: the seats of a rollout, and the sampling seed of every turn of every seat."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agent_system.multi_turn_rollout.episode_buffer import Seat
from agent_system.trajectory import task_key

__all__ = ["TurnSeeds", "make_seats", "sampling_seed"]


def sampling_seed(seed: int, scope: str, task: str, member: int, turn: int) -> int:
    """63-bit seed of one generate call of one row: the same wherever and in whatever batch the row is generated."""
    text = f"{seed}|{scope}|{task}|{member}|{turn}"
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def make_seats(tasks: Sequence[Mapping[str, Any]], group_size: int, prefix: str, first_group: int = 0) -> list[Seat]:
    """`group_size` seats per task, group by group; uids `{prefix}-g{g}` and `{prefix}-g{g}-m{m}`, g from `first_group`.

    A task that occurs more than once gets members that count on, so that no two of its episodes share a seed.
    """
    seats = []
    seen: Counter[str] = Counter()
    for group, task in enumerate(tasks, start=first_group):
        key = task_key(task)
        for member in range(group_size):
            uid = f"{prefix}-g{group}"
            seats.append(Seat(dict(task), uid, f"{uid}-m{member}", seen[key] * group_size + member))
        seen[key] += 1
    return seats


class TurnSeeds:
    """Sampling seeds of seats and their turns."""

    def __init__(self, seed: int, scope: str, seats: Sequence[Seat]) -> None:
        self._seed = seed
        self._scope = scope
        self._keys = [(task_key(seat.task), seat.member) for seat in seats]

    def of(self, seats: np.ndarray, turns: np.ndarray) -> torch.Tensor:
        """(N,) int64."""
        seeds = []
        for seat, turn in zip(seats.tolist(), turns.tolist()):
            task, member = self._keys[seat]
            seeds.append(sampling_seed(self._seed, self._scope, task, member, turn))
        return torch.tensor(seeds, dtype=torch.int64)
