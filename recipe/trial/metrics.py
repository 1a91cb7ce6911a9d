# SPDX-License-Identifier: Apache-2.0
"""What TRIAL logs of one step."""

from __future__ import annotations

import torch
from torch import Tensor

from recipe.trial.allocation import TokenGaps, token_mean

__all__ = ["gap_metrics", "term_metrics", "weight_metrics"]


def gap_metrics(gaps: TokenGaps, success: Tensor) -> dict[str, float]:
    """Means over eligible tokens of the gap before clipping, of all and of successful and failed episodes' rows, and of
    its absolute value; a mean over no token is left out.

    Args:
        success: (B,) bool.
    """
    eligible, won = gaps.eligible, success[:, None]
    parts = {
        "gap_mean": (gaps.gap, eligible),
        "gap_mean_success": (gaps.gap, eligible & won),
        "gap_mean_failure": (gaps.gap, eligible & ~won),
        "gap_abs_mean": (gaps.gap.abs(), eligible),
    }
    return {f"trial/{name}": token_mean(values, mask) for name, (values, mask) in parts.items() if mask.any()}


def weight_metrics(weights: Tensor, num_tokens: Tensor, trajectory: Tensor) -> dict[str, float]:
    """Extremes of the turns' multipliers, and the entropy of how they share out a trajectory's supervision.

    A turn's share is its multiplier times its share of the trajectory's eligible tokens. `weight_entropy` is the mean
    over trajectories of the shares' entropy in nats: 0 when one turn gets everything, at most the log of the number of
    turns. Turns and trajectories without eligible tokens do not count; nothing is returned without any.

    Args:
        weights, num_tokens, trajectory: (B,), see `recipe.trial.allocation.relative_weights`.
    """
    counted = num_tokens > 0
    if not counted.any():
        return {}
    tokens = num_tokens.double()
    all_tokens = torch.bincount(trajectory, weights=tokens)
    share = weights * tokens / all_tokens[trajectory].clamp(min=1.0)
    entropy = torch.bincount(trajectory, weights=-torch.special.xlogy(share, share))
    return {
        "trial/weight_max": float(weights[counted].max()),
        "trial/weight_min": float(weights[counted].min()),
        "trial/weight_entropy": float(entropy[all_tokens > 0].mean()),
    }


def term_metrics(term: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """`dense_to_grpo_ratio`: mean absolute value of what was added over that of the advantages before; left out where
    the advantages are all 0.

    Args:
        term, advantages: (B, R). mask: (B, R) bool, response tokens.
    """
    base = token_mean(advantages.abs(), mask)
    return {"trial/dense_to_grpo_ratio": token_mean(term.abs(), mask) / base} if base > 0 else {}
