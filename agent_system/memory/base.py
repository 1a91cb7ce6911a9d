# SPDX-License-Identifier: Apache-2.0
"""The memory contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["BaseMemory", "Turn"]

# One remembered turn: the same keys in every turn of every slot, for example {"text_obs": ..., "action": ...}.
Turn = dict[str, Any]


class BaseMemory(ABC):
    """Remembers turns per environment slot.

    Life cycle: `reset(batch_size)` at the start of an episode batch, then one `store` per turn (all slots, or the
    slots that are still alive), and any number of `fetch` calls between.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of slots."""

    @abstractmethod
    def __getitem__(self, idx: int) -> list[Turn]:
        """The turns of slot `idx`, oldest first. The list is the memory's own: do not change it."""

    @abstractmethod
    def reset(self, batch_size: int) -> None:
        """Forget everything and make room for `batch_size` slots (at least 0)."""

    @abstractmethod
    def store(self, record: Mapping[str, Sequence[Any]], slots: Sequence[int] | None = None) -> None:
        """Add one turn to each of `slots` (None = all, in order).

        Args:
            record: key -> one value per entry of `slots`. The keys of the first call after `reset` are binding.

        Raises:
            AssertionError: other keys than before, or a column of the wrong length.
        """

    @abstractmethod
    def fetch(self, history_length: int) -> tuple[list[str], list[int]]:
        """History text of every slot and the number of turns it shows.

        Args:
            history_length: how many of the newest turns to show; 0 shows all of them.
        """
