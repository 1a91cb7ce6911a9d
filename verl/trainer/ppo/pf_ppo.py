# SPDX-License-Identifier: Apache-2.0
"""PF-PPO (arXiv 2409.06957): learn from rows resampled by how informative their reward is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.columns import tensors_of

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = ["REWEIGHT_METHODS", "compute_pf_ppo_reweight_data", "pf_ppo_weights"]

REWEIGHT_METHODS = ("pow", "max_min", "max_random")
MIN_WEIGHT = 1e-8


def pf_ppo_weights(scores: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """How often each row should be drawn, not normalised: ``(B,)`` -> ``(B,)`` float64, at least 1e-8.

    ``pow``: ``|s|^weight_pow``; ``max_min``: 1 for the rows with the largest and the smallest score, else 0;
    ``max_random``: 0.4 for the rows with the largest score, else 0.1.

    Raises:
        ValueError: unknown method, or a score that is not finite.
    """
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("pf_ppo cannot weigh rows whose scores are not finite")
    scores = scores.double()
    if reweight_method == "pow":
        weights = scores.abs().pow(weight_pow)
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif reweight_method == "max_random":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    else:
        raise ValueError(f"reweight_method {reweight_method!r} is unknown (known: {', '.join(REWEIGHT_METHODS)})")
    return (weights + MIN_WEIGHT).clamp(min=MIN_WEIGHT)


def compute_pf_ppo_reweight_data(
    data: DataProto,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    rng: np.random.Generator | None = None,
) -> DataProto:
    """As many rows as there are, drawn with replacement by :func:`pf_ppo_weights` of their ``token_level_scores``.

    Rows keep all their columns, so advantages have to be there already; trajectories are torn apart.

    Args:
        rng: of the draw; None makes one from torch's global generator, so that ``torch.manual_seed`` decides.

    Returns:
        A new batch; ``data`` is not changed.
    """
    scores = tensors_of(data)["token_level_scores"].sum(dim=-1).cpu()
    weights = pf_ppo_weights(scores, reweight_method, weight_pow).numpy()
    if rng is None:
        rng = np.random.default_rng(int(torch.randint(2**62, ())))
    drawn = rng.choice(len(data), size=len(data), replace=True, p=weights / weights.sum())
    return data.select_idxs(torch.from_numpy(drawn))
