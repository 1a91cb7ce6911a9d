# SPDX-License-Identifier: Apache-2.0
"""Reward and advantage shaping from step credit: pure functions on arrays and tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["MAX_EPISODE_REWARD", "EpisodeCredit", "redundant_steps", "scale_redundant_advantages", "shaped_reward"]

MAX_EPISODE_REWARD = 10.0
"""Reward of a success in ALFWorld and WebShop; `R_max` of the absolute penalty."""


def redundant_steps(
    credit: np.ndarray, threshold: float, exploration: np.ndarray | None = None, *, count_exploration: bool = True
) -> np.ndarray:
    """Which steps of one successful episode count as redundant.

    Args:
        credit: (T,) float, 1 necessary ... 0 redundant.
        threshold: steps with credit below it are redundant.
        exploration: (T,) bool, steps that revealed something new; needed when `count_exploration` is False.
        count_exploration: False exempts exploration steps.

    Returns:
        (T,) bool. A success has at least one necessary step, so if every step would be redundant the last one
        counts as necessary.
    """
    redundant: np.ndarray = np.asarray(credit, dtype=np.float64) < threshold
    if not count_exploration:
        if exploration is None:
            raise ValueError("count_exploration=False needs the exploration mask")
        redundant &= ~np.asarray(exploration, dtype=bool)
    if redundant.size and redundant.all():
        redundant[-1] = False
    return redundant


@dataclass(frozen=True)
class EpisodeCredit:
    """Verdict on the T steps of a success, up to where it first succeeds.

    credit: (T,) float32, 1 necessary ... 0 redundant. redundant: (T,) bool, the steps that count in `rho`.
    """

    credit: np.ndarray
    redundant: np.ndarray

    @property
    def rho(self) -> float:
        """Redundant share of the steps, in [0, 1)."""
        return float(self.redundant.mean())

    def credit_of(self, step_index: int) -> float:
        """Credit of a step; NaN after the success."""
        return float(self.credit[step_index]) if step_index < len(self.credit) else float("nan")

    def is_redundant(self, step_index: int) -> bool:
        """Whether a step counts as redundant; False after the success."""
        return step_index < len(self.redundant) and bool(self.redundant[step_index])


def shaped_reward(reward: float, rho: float, alpha: float, penalty: str) -> float:
    """Episode reward of a success after the redundancy penalty; `rho` is the redundant share of its steps, in [0, 1).

    relative: R (1 - alpha rho): with alpha <= 1 a success stays above every failure of reward 0.
    absolute: R - alpha rho R_max.
    """
    if penalty == "relative":
        return reward * (1.0 - alpha * rho)
    if penalty == "absolute":
        return reward - alpha * rho * MAX_EPISODE_REWARD
    raise ValueError(f"unknown penalty {penalty!r}")


def scale_redundant_advantages(advantages: torch.Tensor, redundant: torch.Tensor, alpha: float) -> torch.Tensor:
    """Positive advantages of redundant steps times max(0, 1 - alpha); all others unchanged.

    Args:
        advantages: (B, R) float.
        redundant: (B,) bool, rows that are redundant steps of a successful episode.
        alpha: weight of the penalty.
    """
    factor = max(0.0, 1.0 - alpha)
    return torch.where(redundant.unsqueeze(-1) & (advantages > 0), advantages * factor, advantages)
