# SPDX-License-Identifier: Apache-2.0
"""KL terms between the policy and a reference, and the controllers of their coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.utils.errors import UserError

if TYPE_CHECKING:
    from verl.trainer.config.schema import KLCtrlConfig

__all__ = [
    "KL_KINDS",
    "AdaptiveKLController",
    "FixedKLController",
    "compute_rewards",
    "get_kl_controller",
    "kl_penalty",
]

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

# exp(20) = 4.9e8 is far outside any clip range, and still finite when multiplied by an advantage or a gradient.
MAX_LOG_RATIO = 20.0
LOW_VAR_KL_LIMIT = 10.0


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token KL estimate between the policy and a reference, ``(B, R)`` (Schulman's k1, k2, k3).

    ``kl``/``k1``: ``lp - ref``; ``abs``: its absolute value; ``mse``/``k2``: ``0.5 (lp - ref)^2``;
    ``low_var_kl``/``k3``: ``exp(d) - d - 1`` with ``d = ref - lp``, clamped to [-10, 10]. ``d`` is clamped before
    ``exp`` so that value and gradient stay finite for any log-ratio.

    Raises:
        NotImplementedError: ``full`` (needs whole distributions).
        ValueError: unknown kind.
    """
    if kl_penalty in ("kl", "k1"):
        return logprob - ref_logprob
    if kl_penalty == "abs":
        return (logprob - ref_logprob).abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * (logprob - ref_logprob).square()
    if kl_penalty in ("low_var_kl", "k3"):
        diff = (ref_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (torch.exp(diff) - diff - 1.0).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
    if kl_penalty == "full":
        raise NotImplementedError("kl_penalty 'full' needs whole distributions; use 'low_var_kl'")
    raise ValueError(f"kl_penalty {kl_penalty!r} is unknown (known: {', '.join(KL_KINDS)})")


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores minus ``kl_ratio`` times the k1 estimate, ``(B, R)``; not masked."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


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
