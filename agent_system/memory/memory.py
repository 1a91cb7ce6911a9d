# SPDX-License-Identifier: Apache-2.0
"""History as text. The two line formats are seen by models and therefore fixed (golden values in the tests)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_system.memory.base import BaseMemory, Turn

__all__ = ["SearchMemory", "SimpleMemory", "format_action_history"]


def _simple_line(number: int, observation: str, action: str) -> str:
    return f"[Observation {number}: '{observation}', Action {number}: '{action}']"


def _search_line(number: int, observation: str, action: str) -> str:
    return f"Step {number}:{action} {observation}\n"


def format_action_history(history: Sequence[tuple[str, str]], shown: int) -> str:
    """The newest `shown` (observation, action) pairs in SimpleMemory's format, numbered over the whole episode."""
    start = len(history) - min(shown, len(history))
    return "\n".join(_simple_line(start + i + 1, obs, action) for i, (obs, action) in enumerate(history[start:]))


class SimpleMemory(BaseMemory):
    """One line `[Observation k: '...', Action k: '...']` per turn, k counted from 1 over the whole episode."""

    _line = staticmethod(_simple_line)

    def __init__(self) -> None:
        self._slots: list[list[Turn]] = []
        self._keys: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, idx: int) -> list[Turn]:
        return self._slots[idx]

    def reset(self, batch_size: int) -> None:
        self._slots = [[] for _ in range(batch_size)]
        self._keys = None

    def store(self, record: Mapping[str, Sequence[Any]], slots: Sequence[int] | None = None) -> None:
        targets = range(len(self._slots)) if slots is None else slots
        if self._keys is None:
            self._keys = tuple(record)
        assert set(record) == set(self._keys), f"memory keys are {sorted(self._keys)}, got {sorted(record)}"
        for key, values in record.items():
            assert len(values) == len(targets), f"memory column {key!r}: {len(values)} values for {len(targets)} slots"
        for row, slot in enumerate(targets):
            self._slots[slot].append({key: values[row] for key, values in record.items()})

    def fetch(
        self, history_length: int, obs_key: str = "text_obs", action_key: str = "action"
    ) -> tuple[list[str], list[int]]:
        """History text of every slot and the number of turns it shows; `history_length=0` shows all turns."""
        texts, lengths = [], []
        for turns in self._slots:
            start = max(len(turns) - history_length, 0) if history_length > 0 else 0
            lines = [self._line(start + i + 1, turn[obs_key], turn[action_key]) for i, turn in enumerate(turns[start:])]
            texts.append("\n".join(lines))
            lengths.append(len(lines))
        return texts, lengths


class SearchMemory(SimpleMemory):
    """One entry `Step k:{action} {observation}` plus a line end per turn, for environments that answer queries."""

    _line = staticmethod(_search_line)
