# SPDX-License-Identifier: Apache-2.0
"""What a scripted expert says at each step, in every environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["Distractions", "ExpertAction", "Kind"]

Kind = Literal["plan", "detour", "mistake"]


@dataclass(frozen=True, slots=True)
class ExpertAction:
    """A command, a thought of two to four words, and why: towards the goal, useless on purpose, or not admissible."""

    action: str
    thought: str
    kind: Kind


class Distractions:
    """Draws which steps of an expert are useless, or wrong, on purpose.

    Args:
        rng: source of the draws; one for each step that may be distracted, none where both rates are 0.
        detour_rate, error_rate: chances of a detour and of a mistake, together below 1.
        num_steps: only the first so many steps are distracted, so that even a long episode ends in time.

    Raises:
        ValueError: one of the rates or their sum is not in [0, 1).
    """

    def __init__(self, rng: np.random.Generator, detour_rate: float, error_rate: float, num_steps: int) -> None:
        total = detour_rate + error_rate
        chances = {"detour_rate": detour_rate, "error_rate": error_rate, "detour_rate + error_rate": total}
        for name, rate in chances.items():
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{name}={rate} is not in [0, 1)")
        self._rng = rng
        self._error_rate, self._any_rate = error_rate, total
        self._num_steps = num_steps

    def kind(self, step: int) -> Kind:
        """What step number `step` (from 0) is."""
        if self._any_rate == 0.0 or step >= self._num_steps:
            return "plan"
        draw = self._rng.random()
        if draw < self._error_rate:
            return "mistake"
        return "detour" if draw < self._any_rate else "plan"
