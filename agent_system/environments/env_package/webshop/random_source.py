# SPDX-License-Identifier: Apache-2.0
"""Random draws that are the same on every machine, Python version and hash seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Draws"]

T = TypeVar("T")


class Draws:
    """A stream of draws named by its key.

    Only `random.Random.random` is used, the one sequence that Python promises to keep for a seed.
    """

    def __init__(self, *key: object) -> None:
        """
        Args:
            key: integers and strings that name the stream.
        """
        self._random = random.Random("/".join(map(str, key))).random

    def chance(self, probability: float) -> bool:
        """True with a probability in [0, 1]."""
        return self._random() < probability

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.integer(0, len(options) - 1)]

    def weighted(self, weights: Sequence[tuple[T, float]]) -> T:
        """One of the options, each with its share of the total weight."""
        point = self._random() * sum(weight for _, weight in weights)
        for option, weight in weights:
            point -= weight
            if point < 0:
                return option
        return weights[-1][0]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options (all if there are fewer) in random order."""
        pool = list(options)
        for place in range(min(count, len(pool))):
            other = self.integer(place, len(pool) - 1)
            pool[place], pool[other] = pool[other], pool[place]
        return pool[:count]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """All options in random order."""
        return self.sample(options, len(options))
