# SPDX-License-Identifier: Apache-2.0
"""Numbers of the policy update: group statistics, advantage estimators, policy losses, KL terms, KL controllers.

Everything here is a pure function of tensors. Estimators and losses are registered by name
(:func:`register_adv_est`, :func:`register_policy_loss`); the registries live in :mod:`verl.trainer.ppo.registry`.

Shapes: ``B`` rows (one row is one turn of an episode), ``R`` response positions. Masks are ``(B, R)`` with 0/1.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.registry import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    PolicyLoss,
    PolicyLossOutput,
    get_adv_estimator,
    get_policy_loss,
    register_adv_est,
    register_policy_loss,
)
from verl.utils.errors import UserError
from verl.utils.torch_functional import masked_sum

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.config.schema import ActorConfig, AlgorithmConfig, KLCtrlConfig

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "KL_KINDS",
    "LOSS_AGG_MODES",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "PolicyLoss",
    "PolicyLossOutput",
    "agg_loss",
    "compute_entropy_loss",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_vanilla",
    "factorize",
    "get_adv_estimator",
    "get_kl_controller",
    "get_policy_loss",
    "group_stats",
    "kl_penalty",
    "masked_sum",
    "register_adv_est",
    "register_policy_loss",
]

Singleton = Literal["reference", "zero"]
GroupIndex = Sequence[Hashable] | np.ndarray

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

# exp(20) = 4.9e8 is far outside any clip range, and still finite when multiplied by an advantage or a gradient.
MAX_LOG_RATIO = 20.0
LOW_VAR_KL_LIMIT = 10.0


# ---------------------------------------------------------------------------------------------------------------------
# Group statistics and outcome advantages


def factorize(keys: Iterable[Hashable]) -> np.ndarray:
    """Number equal keys with equal integers, in order of first appearance: ``(B,)`` int64. O(B)."""
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), dtype=np.int64)


def group_stats(
    scores: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased standard deviation and number of entries of each row's group.

    Args:
        scores: ``(B,)`` floats, one per row.
        index: ``(B,)`` group keys; equal keys form one group.
        traj_index: ``(B,)`` trajectory keys; only read when ``cross_steps`` is False.
        cross_steps: True: every row is an entry, so long episodes weigh more (the reference's default).
            False: one entry per trajectory, its first row in batch order (so rows must be in turn order).
        singleton: statistics of a group with one entry. ``reference``: mean 0, std 1 (the score passes through
            unchanged); ``zero``: mean = the entry, std 1 (the advantage is 0).

    Returns:
        ``(mean, std, count)``, each ``(B,)``; mean and std float64, count int64. Sums run in float64, so a group of
        equal scores has std exactly 0 whatever the order of its rows.

    Raises:
        ValueError: lengths differ, or ``cross_steps`` is False without ``traj_index``.
    """
    num_rows = scores.shape[0]
    group = factorize(index)
    if scores.dim() != 1 or len(group) != num_rows:
        raise ValueError(f"scores of shape {tuple(scores.shape)} and {len(group)} group keys do not match")
    entry = np.ones(num_rows, dtype=bool)
    if not cross_steps:
        if traj_index is None or len(traj_index) != num_rows:
            raise ValueError("one entry per trajectory needs one trajectory key per row")
        traj = factorize(zip(group.tolist(), traj_index, strict=True))
        entry = np.zeros(num_rows, dtype=bool)
        entry[np.unique(traj, return_index=True)[1]] = True

    # Centred on the group's first entry: sums of equal scores are then exactly 0, and large offsets cost no digits.
    values = scores.detach().to("cpu", torch.float64).numpy()
    num_groups = int(group.max()) + 1 if num_rows else 0
    first_row = np.unique(group[entry], return_index=True)[1]
    origin = values[entry][first_row]
    count = np.bincount(group[entry], minlength=num_groups)
    shifted = values - origin[group]
    mean_shift = np.bincount(group[entry], weights=shifted[entry], minlength=num_groups) / np.maximum(count, 1)
    squares = np.bincount(group[entry], weights=(shifted - mean_shift[group])[entry] ** 2, minlength=num_groups)
    std = np.sqrt(squares / np.maximum(count - 1, 1))
    mean = origin + mean_shift
    alone = count == 1
    std[alone] = 1.0
    if singleton == "reference":
        mean[alone] = 0.0
    stats = (mean[group], std[group], count[group])
    return tuple(torch.from_numpy(np.ascontiguousarray(x)).to(scores.device) for x in stats)  # type: ignore[return-value]


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    compute_mean_std_cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> tuple[Tensor, Tensor]:
    """GRPO: ``A = (s - mean_g) / (std_g + epsilon)`` with ``s`` the row's summed reward, or without the division.

    Args:
        token_level_rewards, response_mask: ``(B, R)``.
        index, traj_index, compute_mean_std_cross_steps, singleton: see :func:`group_stats`.

    Returns:
        ``(advantages, returns)``: the same ``(B, R)`` float32 values, broadcast over the response tokens and 0
        elsewhere. Groups without variance get 0.
    """
    scores = token_level_rewards.sum(dim=-1)
    mean, std, _ = group_stats(scores, index, traj_index, compute_mean_std_cross_steps, singleton)
    centred = scores.double() - mean
    if norm_adv_by_std_in_grpo:
        centred = centred / (std + epsilon)
    advantages = centred.float().unsqueeze(-1) * response_mask
    return advantages, advantages.clone()


@register_adv_est("grpo")
def _grpo(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    tensors = tensors_of(batch)
    return compute_grpo_outcome_advantage(
        tensors["token_level_rewards"],
        tensors["response_mask"],
        batch.non_tensor_batch["uid"],
        batch.non_tensor_batch["traj_uid"],
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        compute_mean_std_cross_steps=config.compute_mean_std_cross_steps,
        singleton=config.singleton_advantage,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Losses


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
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("give cliprange, or both cliprange_low and cliprange_high")
    out = _dual_clip(old_log_prob, log_prob, advantages, response_mask, low, high, clip_ratio_c)
    num_tokens = response_mask.sum().clamp(min=1)
    fractions = [out.metrics[name] / num_tokens for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")]
    return agg_loss(out.per_token_loss, response_mask, loss_agg_mode), fractions[0], fractions[1], fractions[2]


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of the next-token distributions; ``logits`` is ``(B, R, V)``."""
    entropy = torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return agg_loss(entropy, response_mask, loss_agg_mode)


# ---------------------------------------------------------------------------------------------------------------------
# KL


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Per-token KL estimate between the policy and a reference, ``(B, R)`` (Schulman's k1, k2, k3).

    ``kl``/``k1``: ``lp - ref``; ``abs``: its absolute value; ``mse``/``k2``: ``0.5 (lp - ref)^2``;
    ``low_var_kl``/``k3``: ``exp(d) - d - 1`` with ``d = ref - lp``, clamped to [-10, 10]. ``d`` is clamped before
    ``exp`` so that value and gradient stay finite for any log-ratio.

    Raises:
        NotImplementedError: ``full`` (needs whole distributions).
        ValueError: unknown kind.
    """
    if kind in ("kl", "k1"):
        return logprob - ref_logprob
    if kind == "abs":
        return (logprob - ref_logprob).abs()
    if kind in ("mse", "k2"):
        return 0.5 * (logprob - ref_logprob).square()
    if kind in ("low_var_kl", "k3"):
        diff = (ref_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (torch.exp(diff) - diff - 1.0).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
    if kind == "full":
        raise NotImplementedError("kl_penalty 'full' needs whole distributions; use 'low_var_kl'")
    raise ValueError(f"kl_penalty {kind!r} is unknown (known: {', '.join(KL_KINDS)})")


class FixedKLController:
    """Constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """``beta *= 1 + clip(kl/target - 1, -0.2, 0.2) * n_steps/horizon`` (arXiv 1909.08593)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient; a KL that is not finite leaves it unchanged."""
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: KLCtrlConfig) -> FixedKLController:
    """Controller of ``algorithm.kl_ctrl``.

    Raises:
        UserError: unknown type, or an adaptive controller whose horizon or target is not positive.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        if kl_ctrl.horizon <= 0 or kl_ctrl.target_kl <= 0:
            raise UserError("algorithm.kl_ctrl.horizon and algorithm.kl_ctrl.target_kl must be positive")
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise UserError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is unknown (known: fixed, adaptive)")
