# SPDX-License-Identifier: Apache-2.0
"""Policy, value and entropy losses, and their reduction to one number.

Shapes: ``B`` rows (one row is one turn of an episode), ``R`` response positions. Masks are ``(B, R)`` with 0/1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.trainer.ppo.kl import MAX_LOG_RATIO
from verl.trainer.ppo.registry import PolicyLossOutput, ValueLossOutput, register_policy_loss
from verl.utils.torch_functional import entropy_from_logits, masked_sum

if TYPE_CHECKING:
    from verl.trainer.config.schema import ActorConfig

__all__ = [
    "LOSS_AGG_MODES",
    "agg_loss",
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_policy_loss_gspo",
    "compute_policy_loss_gspo_tokens",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "compute_value_loss_tokens",
]

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

GSPO_AGG_MODE = "seq-mean-token-mean"
GSPO_MAX_LOG_RATIO = 10.0


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    num_tokens: int | float | Tensor | None = None,
    num_rows: int | float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Reduce per-token losses ``(B, R)`` to one scalar.

    ``token-mean``: masked sum / tokens. ``seq-mean-token-sum``: mean over rows of masked sums.
    ``seq-mean-token-mean``: mean over rows of masked means. ``seq-mean-token-sum-norm``: masked sum / R.

    Rows without a token contribute nothing and are not counted. To accumulate one mini-batch over micro-batches and
    ranks, pass the **mini-batch's** counts: the sum of the parts is then the loss of the whole, however it was cut.

    Args:
        num_tokens: tokens to divide by (default: those of this mask).
        num_rows: rows with at least one token to divide by (default: those of this mask).
        max_length: R of ``seq-mean-token-sum-norm`` (default: this matrix' width; pass it where padding was trimmed).

    Raises:
        ValueError: unknown mode.
    """
    mask = loss_mask.bool()
    masked = torch.where(mask, loss_mat, torch.zeros((), dtype=loss_mat.dtype, device=loss_mat.device))
    if loss_agg_mode == "token-mean":
        return masked.sum() / _at_least_one(mask.sum() if num_tokens is None else num_tokens)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return masked.sum() / (loss_mat.shape[-1] if max_length is None else max_length)
    lengths = mask.sum(dim=-1)
    rows = _at_least_one((lengths > 0).sum() if num_rows is None else num_rows)
    if loss_agg_mode == "seq-mean-token-sum":
        return masked.sum() / rows
    if loss_agg_mode == "seq-mean-token-mean":
        return (masked.sum(dim=-1) / lengths.clamp(min=1)).sum() / rows
    raise ValueError(f"loss_agg_mode {loss_agg_mode!r} is unknown (known: {', '.join(LOSS_AGG_MODES)})")


def _at_least_one(count: int | float | Tensor) -> int | float | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Policy


def _dual_clip(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLossOutput:
    """Per-token dual-clip PPO loss (arXiv 1912.09729) and the masked sums of its metrics.

    ``ratio = exp(new - old)``, ``L1 = -A ratio``, ``L2 = -A clamp(ratio, 1-low, 1+high)``, ``L = max(L1, L2)``, and
    where ``A < 0``: ``min(L, -A c)``. The log-ratio is clamped to +-20 before ``exp`` so that no gradient is NaN.
    """
    if clip_c <= 1.0:
        raise ValueError(f"actor.clip_ratio_c must be greater than 1, got {clip_c}")
    log_ratio = log_prob - old_log_prob
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    upper = torch.maximum(plain, clipped)
    floor = -advantages * clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(upper, floor), upper)
    with torch.no_grad():
        metrics = {
            "pg_clipfrac": masked_sum((clipped > plain).to(loss.dtype), response_mask),
            "ppo_kl": masked_sum(-log_ratio, response_mask),
            "pg_clipfrac_lower": masked_sum(((upper > floor) & negative).to(loss.dtype), response_mask),
        }
    return PolicyLossOutput(loss, metrics)


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    actor_cfg: ActorConfig,
) -> PolicyLossOutput:
    """Dual-clip PPO with ``clip_ratio_low/high`` (``clip_ratio`` where they are null) and ``clip_ratio_c``."""
    clip = (actor_cfg.clip_low, actor_cfg.clip_high, actor_cfg.clip_ratio_c)
    return _dual_clip(old_log_prob, log_prob, advantages, response_mask, *clip)


def _sequence_ratio(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLossOutput:
    """Per-token GSPO loss, the form GSPO-token (arXiv 2507.18071, equations 5 and 13).

    A row's ratio is ``exp(g)``, ``g`` the mean log-ratio of its tokens; it is clipped as a whole, and its gradient goes
    to every token's log-probability: ``log s = new - stop(new) + stop(g)``, clamped to at most 10. No dual clip.
    """
    log_ratio = log_prob - old_log_prob
    lengths = response_mask.bool().sum(dim=-1).clamp(min=1)
    mean_ratio = (masked_sum(log_ratio, response_mask, axis=-1) / lengths).detach()
    # A row that is far off gets no gradient through exp; below, exp(-inf) is 0 and needs no clamp.
    log_sequence_ratio = log_prob - log_prob.detach() + mean_ratio.unsqueeze(-1)
    ratio = torch.exp(log_sequence_ratio.clamp(max=GSPO_MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    with torch.no_grad():
        metrics = {
            "pg_clipfrac": masked_sum((clipped > plain).to(loss.dtype), response_mask),
            "ppo_kl": masked_sum(-log_ratio, response_mask),
            "pg_clipfrac_lower": torch.zeros((), dtype=loss.dtype, device=loss.device),
        }
    return PolicyLossOutput(loss, metrics, agg_mode=GSPO_AGG_MODE)


@register_policy_loss("gspo")
def compute_policy_loss_gspo_tokens(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    actor_cfg: ActorConfig,
) -> PolicyLossOutput:
    """GSPO with ``clip_ratio_low/high``; always aggregated as ``seq-mean-token-mean``, ``clip_ratio_c`` is not read."""
    clip = (actor_cfg.clip_low, actor_cfg.clip_high)
    return _sequence_ratio(old_log_prob, log_prob, advantages, response_mask, *clip)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vanilla loss of one batch, aggregated: ``(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)``, 0-d each.

    Raises:
        ValueError: ``clip_ratio_c <= 1``, or neither ``cliprange`` nor its low/high form is given.
    """
    low, high = _clip_range(cliprange, cliprange_low, cliprange_high)
    out = _dual_clip(old_log_prob, log_prob, advantages, response_mask, low, high, clip_ratio_c)
    return _aggregated(out, response_mask, loss_agg_mode)


def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = GSPO_AGG_MODE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The GSPO loss of one batch, in the form of :func:`compute_policy_loss`.

    ``clip_ratio_c`` and ``loss_agg_mode`` are there for callers of either loss and not read: GSPO has no dual clip and
    is a mean over rows of means over tokens.

    Raises:
        ValueError: neither ``cliprange`` nor its low/high form is given.
    """
    low, high = _clip_range(cliprange, cliprange_low, cliprange_high)
    out = _sequence_ratio(old_log_prob, log_prob, advantages, response_mask, low, high)
    return _aggregated(out, response_mask, GSPO_AGG_MODE)


def _clip_range(both: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    low, high = both if low is None else low, both if high is None else high
    if low is None or high is None:
        raise ValueError("give cliprange, or both cliprange_low and cliprange_high")
    return low, high


def _aggregated(out: PolicyLossOutput, mask: Tensor, mode: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens = mask.sum().clamp(min=1)
    clipfrac, kl, lower = (out.metrics[name] / num_tokens for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"))
    return agg_loss(out.per_token_loss, mask, mode), clipfrac, kl, lower


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of the next-token distributions; ``logits`` is ``(B, R, V)``."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


# ---------------------------------------------------------------------------------------------------------------------
# Value


def compute_value_loss_tokens(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float
) -> ValueLossOutput:
    """Per-token clipped value loss ``max((v - ret)^2, (clamp(v, old - eps, old + eps) - ret)^2)``, without a half.

    Args:
        vpreds, returns, values, response_mask: ``(B, R)``; ``values`` are those before the update.
        cliprange_value: eps.
    """
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain_loss, clipped_loss = (vpreds - returns).square(), (clipped - returns).square()
    with torch.no_grad():
        clipfrac = masked_sum((clipped_loss > plain_loss).to(vpreds.dtype), response_mask)
        mean = masked_sum(vpreds, response_mask)
    return ValueLossOutput(torch.maximum(plain_loss, clipped_loss), {"vf_clipfrac": clipfrac, "vpred_mean": mean})


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """The value loss of one batch, aggregated: ``(vf_loss, vf_clipfrac)``, 0-d each."""
    out = compute_value_loss_tokens(vpreds, returns, values, response_mask, cliprange_value)
    clipfrac = out.metrics["vf_clipfrac"] / response_mask.sum().clamp(min=1)
    return agg_loss(out.per_token_loss, response_mask, loss_agg_mode), clipfrac
