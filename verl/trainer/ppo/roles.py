# SPDX-License-Identifier: Apache-2.0
"""Names by which code written for verl speaks of roles, their processes and the built-in estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING

from verl.single_controller.base import Worker

if TYPE_CHECKING:
    from verl.single_controller.ray import RayResourcePool

__all__ = ["AdvantageEstimator", "ResourcePoolManager", "Role", "WorkerType"]

WorkerType = type[Worker]


class Role(Enum):
    """What a worker process does."""

    Actor = 0
    Rollout = auto()
    ActorRollout = auto()
    Critic = auto()
    RefPolicy = auto()
    RewardModel = auto()
    ActorRolloutRef = auto()


class AdvantageEstimator(StrEnum):
    """Values of ``algorithm.adv_estimator`` that come with this repository; recipes register more."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_PASSK = "grpo_passk"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    GiGPO = "gigpo"
    HGPO = "hgpo"


@dataclass
class ResourcePoolManager:
    """Pools of processes by name, and which role lives in which.

    ``resource_pool_spec``: pool name -> ranks per node. ``mapping``: role -> pool name. Pools are of GPU processes,
    one worker group a pool.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools; their resources are taken when the first worker group starts."""
        from verl.single_controller.ray import RayResourcePool

        for name, ranks in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                list(ranks), use_gpu=True, name_prefix=name, max_colocate_count=1
            )

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool of a role; KeyError before `create_resource_pool`, or for a role without pool."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Ranks of all pools."""
        return sum(sum(ranks) for ranks in self.resource_pool_spec.values())
