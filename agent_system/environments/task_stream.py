# SPDX-License-Identifier: Apache-2.0
"""The endless order in which training tasks are played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_system.trajectory import task_key
from verl.utils.errors import UserError

__all__ = ["TaskStream"]


class TaskStream:
    """Seeded permutations of a task list, one after the other, for ever.

    Permutation e depends on (seed, e) only, so the position alone restores the stream. The tasks of one `take` differ
    from each other as long as there are enough: a draw that would run over the end of a permutation starts the next
    one, and the few left-over tasks wait for their turn there.
    """

    def __init__(self, tasks: Sequence[Mapping[str, Any]], seed: int) -> None:
        """
        Args:
            tasks: at least one, in an order that does not depend on the machine.
            seed: any non-negative integer.
        """
        if not tasks:
            raise ValueError("a task stream needs at least one task")
        self._tasks = [dict(task) for task in tasks]
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Number of tasks in one permutation."""
        return len(self._tasks)

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """The tasks in the order given (copies)."""
        return [dict(task) for task in self._tasks]

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next `count` tasks (copies)."""
        size = len(self._tasks)
        left = size - self._position % size
        if left < count <= size:
            self._position += left
        taken = [dict(self._tasks[self._index(self._position + i)]) for i in range(count)]
        self._position += count
        return taken

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))
            self._epoch = epoch
        return int(self._order[offset])

    def state_dict(self) -> dict[str, Any]:
        """Position, and a fingerprint of what it is a position in. JSON types."""
        return {"position": self._position, "seed": self._seed, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: the state belongs to another task list or seed.
        """
        if (state["seed"], state["fingerprint"]) != (self._seed, self._fingerprint()):
            raise UserError(
                "the checkpoint's task order belongs to other tasks or another env.seed (it had seed "
                f"{state['seed']}); resume with the same games and seed, or start with trainer.resume_mode=disable."
            )
        self._position = int(state["position"])

    def _fingerprint(self) -> str:
        return task_key({"tasks": [task_key(task) for task in self._tasks]})
