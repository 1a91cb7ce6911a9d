# SPDX-License-Identifier: Apache-2.0
"""What a scripted expert says at each step, in every environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ExpertAction", "Kind", "check_rates"]

Kind = Literal["plan", "detour", "mistake"]


@dataclass(frozen=True, slots=True)
class ExpertAction:
    """A command, a thought of two to four words, and why: towards the goal, useless on purpose, or not admissible."""

    action: str
    thought: str
    kind: Kind


def check_rates(detour_rate: float, error_rate: float) -> None:
    """Refuse chances that leave no room for the plan.

    Raises:
        ValueError: one of them or their sum is not in [0, 1).
    """
    rates = {"detour_rate": detour_rate, "error_rate": error_rate, "detour_rate + error_rate": detour_rate + error_rate}
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{name}={rate} is not in [0, 1)")
