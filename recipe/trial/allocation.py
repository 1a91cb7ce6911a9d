# SPDX-License-Identifier: Apache-2.0
"""TRIAL's equations: token gaps, the turns' multipliers, the dense term. Pure functions, no loop over rows.

One row is one turn. ``B`` rows, ``R`` response positions, ``n_t`` eligible tokens of turn t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from recipe.trial.options import Allocation

__all__ = [
    "TokenGaps",
    "add_term",
    "allocate",
    "clamp_term",
    "dense_term",
    "permute_weights",
    "relative_weights",
    "token_gaps",
    "token_mean",
]


@dataclass(frozen=True)
class TokenGaps:
    """``gap`` ``(B, R)`` float32, 0 where not ``eligible``; ``eligible`` ``(B, R)`` bool."""

    gap: Tensor
    eligible: Tensor

    @property
    def num_tokens(self) -> Tensor:
        """n_t: ``(B,)`` int64."""
        return self.eligible.sum(dim=-1)


def token_gaps(hindsight: Tensor, ordinary: Tensor, mask: Tensor) -> TokenGaps:
    """``g = log p(y | x + o) - log p(y | x)``; a token whose gap is not finite is not eligible.

    Args:
        hindsight, ordinary: ``(B, R)`` log-probabilities of the same tokens.
        mask: ``(B, R)`` bool, tokens that may take part.
    """
    gap = hindsight - ordinary
    eligible = mask & torch.isfinite(gap)
    return TokenGaps(torch.where(eligible, gap, 0.0), eligible)


def relative_weights(magnitude: Tensor, num_tokens: Tensor, trajectory: Tensor) -> Tensor:
    """``w_t = (m_t / sum_s m_s) / (n_t / sum_s n_s)``, sums over the turns of t's trajectory: ``(B,)`` float64.

    The mean of w over the eligible tokens of a trajectory is 1. A trajectory without any magnitude has w = 1; a turn
    without eligible tokens has w = 0.

    Args:
        magnitude: ``(B,)`` m_t, sum of the turn's absolute clipped gaps.
        num_tokens: ``(B,)`` int64 n_t; where it is 0, so is m_t.
        trajectory: ``(B,)`` int64, equal numbers (from 0) for turns of one trajectory.
    """
    tokens, size = num_tokens.double(), magnitude.double()
    all_tokens = torch.bincount(trajectory, weights=tokens)[trajectory]
    all_size = torch.bincount(trajectory, weights=size)[trajectory]
    has_size = all_size > 0
    share = torch.where(has_size, size / torch.where(has_size, all_size, 1.0), 0.0)
    weights = torch.where(has_size, share * (all_tokens / tokens.clamp(min=1.0)), 1.0)
    return torch.where(num_tokens > 0, weights, 0.0)


def permute_weights(weights: Tensor, num_tokens: Tensor, trajectory: Tensor, rng: np.random.Generator) -> Tensor:
    """Shuffle multipliers over the turns of each trajectory, then scale them to mean 1 again: ``(B,)`` float64.

    Only turns with eligible tokens take part: one without could swallow a multiplier. Arguments as in
    `relative_weights`; `rng` is drawn from once per such turn, in row order.
    """
    rows = torch.nonzero(num_tokens > 0).squeeze(-1)
    group = trajectory[rows].numpy()
    in_order = np.argsort(group, kind="stable")
    shuffled = np.lexsort((rng.random(len(group)), group))
    result = torch.zeros_like(weights)
    result[rows[in_order]] = weights[rows[shuffled]]
    tokens = num_tokens.double()
    given = torch.bincount(trajectory, weights=tokens * result)[trajectory]
    wanted = torch.bincount(trajectory, weights=tokens)[trajectory]
    return torch.where(num_tokens > 0, result * (wanted / torch.where(given > 0, given, 1.0)), 0.0)


def allocate(
    allocation: Allocation, clipped: Tensor, num_tokens: Tensor, trajectory: Tensor, rng: np.random.Generator
) -> Tensor:
    """Multiplier of every turn, ``(B,)`` float64, whose mean over a trajectory's eligible tokens is 1.

    Args:
        allocation: ``relative``, ``uniform`` (1 for every turn with eligible tokens) or ``permuted``.
        clipped: ``(B, R)`` clipped gaps, 0 on tokens that are not eligible.
        num_tokens, trajectory: see `relative_weights`.
        rng: only drawn from for ``permuted``.
    """
    if allocation == "uniform":
        return (num_tokens > 0).double()
    weights = relative_weights(clipped.abs().double().sum(dim=-1), num_tokens, trajectory)
    return permute_weights(weights, num_tokens, trajectory, rng) if allocation == "permuted" else weights


def dense_term(clipped: Tensor, weights: Tensor, beta: float) -> Tensor:
    """``beta * w_t * h_k``: ``(B, R)`` float32."""
    return (beta * weights).to(clipped.dtype).unsqueeze(-1) * clipped


def token_mean(values: Tensor, mask: Tensor) -> float:
    """Mean over the tokens where ``mask`` is set; 0 without any."""
    chosen = values[mask].double()
    return float(chosen.mean()) if len(chosen) else 0.0


def clamp_term(term: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The term scaled down until its mean absolute value over the ``mask`` is at most that of the advantages."""
    size, limit = token_mean(term.abs(), mask), token_mean(advantages.abs(), mask)
    return term * (limit / size) if size > limit else term


def add_term(advantages: Tensor, term: Tensor) -> Tensor:
    """Their sum; where the term is 0 the advantage stays as it is to the last bit, its sign of zero included."""
    return torch.where(term == 0, advantages, advantages + term)
