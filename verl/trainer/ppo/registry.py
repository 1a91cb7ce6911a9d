# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators and policy losses by name: plain dicts, filled when the defining modules are imported.

Importing this module does not import torch: a recipe's package registers here and must stay quick for ``--help``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from verl.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from verl.protocol import DataProto
    from verl.trainer.config.schema import ActorConfig, AlgorithmConfig

AdvantageResult: TypeAlias = "tuple[Tensor, Tensor] | tuple[Tensor, Tensor, dict[str, float]]"
"""``(advantages, returns)``, both ``(B, R)`` float32; a third entry holds metrics to log with the step."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator and what the trainer has to prepare for it.

    ``fn(batch, algorithm_config)`` returns an `AdvantageResult`: ``(advantages, returns)``, both ``(B, R)`` float32 and
    possibly the same tensor, then metrics if it has any. It may read every column of the batch and must not change it.
    Rows are in rollout order (each trajectory in turn order). ``needs_critic``: the column ``values`` must exist.
    ``needs_step_returns``: the column ``step_rewards`` (discounted return from this turn on) must exist.
    """

    name: str
    fn: Callable[[DataProto, AlgorithmConfig], AdvantageResult]
    needs_critic: bool = False
    needs_step_returns: bool = False

    def __call__(self, batch: DataProto, config: AlgorithmConfig) -> AdvantageResult:
        return self.fn(batch, config)


@dataclass(frozen=True)
class PolicyLossOutput:
    """What a policy loss returns for one micro-batch.

    ``per_token_loss``: ``(B, R)``, not masked, differentiable in ``log_prob``. ``metrics``: 0-d detached tensors, each
    the **sum over the mask**; the worker divides by the token count of the mini-batch over all ranks.
    ``agg_mode``: aggregation this loss insists on, or None for ``actor.loss_agg_mode``.
    """

    per_token_loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    agg_mode: str | None = None


@dataclass(frozen=True)
class ValueLossOutput:
    """The value loss of one micro-batch; fields as in `PolicyLossOutput`.

    ``metrics``: ``vf_clipfrac`` and ``vpred_mean``, sums over the mask.
    """

    per_token_loss: Tensor
    metrics: dict[str, Tensor]


class PolicyLoss(Protocol):
    """``(old_log_prob, log_prob, advantages, response_mask: each (B, R), actor config) -> PolicyLossOutput``."""

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        actor_cfg: ActorConfig,
    ) -> PolicyLossOutput: ...


ADV_ESTIMATOR_REGISTRY: dict[str, AdvantageEstimator] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLoss] = {}

_Entry = TypeVar("_Entry")
_EstimatorFn = TypeVar("_EstimatorFn", bound="Callable[..., AdvantageResult]")
_LossFn = TypeVar("_LossFn", bound=Callable[..., PolicyLossOutput])


def register_adv_est(
    name: str, *, needs_critic: bool = False, needs_step_returns: bool = False
) -> Callable[[_EstimatorFn], _EstimatorFn]:
    """Register an advantage estimator under ``algorithm.adv_estimator=name``.

    Raises:
        ValueError: another function already has that name (importing the same module twice is harmless).
    """

    def wrap(fn: _EstimatorFn) -> _EstimatorFn:
        _refuse_other("advantage estimator", name, ADV_ESTIMATOR_REGISTRY.get(name), fn)
        ADV_ESTIMATOR_REGISTRY[name] = AdvantageEstimator(name, fn, needs_critic, needs_step_returns)
        return fn

    return wrap


def register_policy_loss(name: str) -> Callable[[_LossFn], _LossFn]:
    """Register a policy loss under ``actor_rollout_ref.actor.policy_loss.loss_mode=name``.

    Raises:
        ValueError: another function already has that name.
    """

    def wrap(fn: _LossFn) -> _LossFn:
        _refuse_other("policy loss", name, POLICY_LOSS_REGISTRY.get(name), fn)
        POLICY_LOSS_REGISTRY[name] = fn
        return fn

    return wrap


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """Estimator registered as ``name``.

    Raises:
        UserError: unknown name; the message lists the known ones.
    """
    return _lookup("algorithm.adv_estimator", name, ADV_ESTIMATOR_REGISTRY)


def get_policy_loss(name: str) -> PolicyLoss:
    """Policy loss registered as ``name``.

    Raises:
        UserError: unknown name; the message lists the known ones.
    """
    return _lookup("actor_rollout_ref.actor.policy_loss.loss_mode", name, POLICY_LOSS_REGISTRY)


def _refuse_other(kind: str, name: str, present: object, fn: Callable[..., object]) -> None:
    if present is None:
        return
    old = present.fn if isinstance(present, AdvantageEstimator) else present
    old_home = (old.__module__, getattr(old, "__qualname__", ""))
    new_home = (fn.__module__, getattr(fn, "__qualname__", ""))
    if old_home != new_home:
        raise ValueError(f"{kind} {name!r} is already registered by {'.'.join(old_home)}; choose another name")


def _lookup(key: str, name: str, registry: Mapping[str, _Entry]) -> _Entry:
    if name in registry:
        return registry[name]
    known = ", ".join(sorted(registry))
    near = difflib.get_close_matches(name, registry, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"{key}={name!r} is not registered (known: {known}).{hint} "
        "A recipe registers its own names when its module is listed in algorithm.recipe_modules."
    )
