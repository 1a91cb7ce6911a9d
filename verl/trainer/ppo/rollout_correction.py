# SPDX-License-Identifier: Apache-2.0
"""The sampler and the policy that learns are the same weights in two implementations: how far apart they are, and what
to do about it.

With ``d = log pi_old - log pi_rollout`` per sampled token, of the policy before the update and of the engine at the
time of sampling, an expectation over what was sampled is one over the policy after weighting with ``exp d``. Weights
are truncated (Espeholt et al. 2018, arXiv 1802.01561): ``min(exp d, C)``, per token or with ``d`` summed over the row.
Rows or tokens too far away can be rejected instead.

Every policy loss of this package is linear in the advantage of a token, so that weighting advantages weights the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.kl import MAX_LOG_RATIO
from verl.trainer.ppo.metric_utils import compute_rollout_probs_diff
from verl.utils.errors import UserError
from verl.utils.torch_functional import masked_mean

if TYPE_CHECKING:
    from verl.trainer.config.schema import RolloutCorrectionConfig

__all__ = [
    "add_rollout_correction",
    "check_engine",
    "correct_rows",
    "importance_weights",
    "kept_tokens",
    "rollout_kl",
]

WEIGHTS = "rollout_is_weights"
"""Column: float32 ``(B, R)``, factors of the advantages."""
KEPT = "rollout_rs_mask"
"""Column: bool ``(B, R)``, tokens that are not rejected."""


def rollout_kl(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """``rollout_corr/{kl, k3_kl}``: KL(rollout, policy) in nats per token, over what was sampled.

    ``kl`` is the mean of ``-d``; ``k3_kl`` the mean of ``exp(d) - d - 1`` (Schulman), which is never negative and
    varies less.

    Args:
        log_ratio: ``d``, ``(B, R)``; clamped to +-20 before ``exp``.
        mask: ``(B, R)``, the sampled tokens.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "rollout_corr/kl": masked_mean(-log_ratio, mask).item(),
        "rollout_corr/k3_kl": masked_mean(torch.exp(clamped) - clamped - 1.0, mask).item(),
    }


def _ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """``exp d`` of tokens, ``exp`` of its sum over a row (sequence) or of its mean (geometric): ``(B, R)``."""
    masked = log_ratio * mask
    if level == "sequence":
        masked = masked.sum(dim=1, keepdim=True).expand_as(masked)
    elif level == "geometric":
        masked = (masked.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)).expand_as(masked)
    return torch.exp(masked.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance_weights(log_ratio: Tensor, mask: Tensor, level: str, cap: float) -> Tensor:
    """Truncated importance weights ``min(ratio, cap)``, ``(B, R)`` float32, 0 outside of the mask.

    Args:
        log_ratio: ``d``, ``(B, R)``.
        level: ``token``, or ``sequence``: one weight for all tokens of a row.
    """
    return _ratios(log_ratio, mask, level).clamp(max=cap) * mask


def kept_tokens(log_ratio: Tensor, mask: Tensor, level: str, low: float, high: float) -> Tensor:
    """Tokens whose ratio lies in ``[low, high]``, ``(B, R)`` bool, False outside of the mask.

    ``level``: ``token`` rejects tokens; ``sequence`` and ``geometric`` (the ratio's geometric mean over the row's
    tokens) reject whole rows.
    """
    ratios = _ratios(log_ratio, mask, level)
    return (ratios >= low) & (ratios <= high) & mask.bool()


def check_engine(config: RolloutCorrectionConfig, gives_log_probs: bool) -> None:
    """Refuse a correction that nothing can be computed from.

    Args:
        gives_log_probs: whether the engine says what it sampled from, at the sampling parameters of training.

    Raises:
        UserError: it does not, and a correction is asked for.
    """
    if config.is_on and not gives_log_probs:
        raise UserError(
            "algorithm.rollout_correction needs the log-probs of the distribution that was sampled from, and this "
            "engine gives none at these sampling parameters; set actor_rollout_ref.rollout.temperature=1 with "
            "top_p=1 and top_k=-1, install vLLM 0.10.2 or newer, or set algorithm.rollout_correction.rollout_is "
            "and rollout_rs to null"
        )


def add_rollout_correction(batch: DataProto, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Metrics of the distance between engine and policy, and the columns that `correct_rows` applies.

    Args:
        batch: ``response_mask``, ``old_log_probs`` and, where the engine gives them, ``rollout_log_probs`` ``(B, R)``.

    Returns:
        ``training/rollout_probs_diff_*`` and ``rollout_corr/*``; empty without ``rollout_log_probs``.

    Raises:
        UserError: as `check_engine`.
    """
    tensors = tensors_of(batch)
    if "rollout_log_probs" not in tensors:
        check_engine(config, gives_log_probs=False)
        return {}
    mask = tensors["response_mask"].float()
    log_ratio = tensors["old_log_probs"].float() - tensors["rollout_log_probs"].float()
    metrics = compute_rollout_probs_diff(batch) | rollout_kl(log_ratio, mask)
    if config.rollout_is is not None:
        weights = importance_weights(log_ratio, mask, config.rollout_is, config.rollout_is_threshold)
        metrics |= _weight_metrics(weights, mask, config.rollout_is_threshold)
        tensors[WEIGHTS] = weights
    if config.rollout_rs is not None:
        kept = kept_tokens(log_ratio, mask, config.rollout_rs, *config.bounds)
        rows = mask.any(dim=1)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1.0 - masked_mean(kept.float(), mask).item()
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = 1.0 - masked_mean(kept.any(dim=1).float(), rows).item()
        tensors[KEPT] = kept
    return metrics


def _weight_metrics(weights: Tensor, mask: Tensor, cap: float) -> dict[str, float]:
    chosen = weights[mask.bool()]
    if chosen.numel() == 0:
        chosen = torch.ones(1)
    effective = chosen.sum().square() / chosen.square().sum().clamp(min=1e-12) / chosen.numel()
    return {
        "rollout_corr/rollout_is_mean": chosen.mean().item(),
        "rollout_corr/rollout_is_max": chosen.max().item(),
        "rollout_corr/rollout_is_min": chosen.min().item(),
        "rollout_corr/rollout_is_eff_sample_size": effective.item(),
        "rollout_corr/rollout_is_truncated_fraction": (chosen >= cap).float().mean().item(),
    }


def correct_rows(batch: DataProto) -> DataProto:
    """The batch for the update: advantages weighted, rejected tokens taken out of the response mask.

    The given batch stays as it is; without the columns of `add_rollout_correction` it is what is returned.
    """
    tensors = tensors_of(batch)
    if WEIGHTS not in tensors and KEPT not in tensors:
        return batch
    corrected = batch.select()
    changed = tensors_of(corrected)
    if WEIGHTS in tensors:
        changed["advantages"] = tensors["advantages"] * tensors[WEIGHTS]
    if KEPT in tensors:
        changed["response_mask"] = tensors["response_mask"] * tensors[KEPT]
    return corrected
