# SPDX-License-Identifier: Apache-2.0
"""The worker roles of a run and the two ways to start them: Ray actors, or one rank inside this process.

A factory takes ``role -> ClassWithInitArgs`` and returns ``role -> WorkerGroup``; all roles share their processes and
devices. The trainer gets the factory, so that tests of the algorithm need no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
    from verl.trainer.config.schema import PPOConfig

ACTOR_ROLLOUT = "actor_rollout"
REF = "ref"

WorkerGroupFactory = Callable[[Mapping[str, ClassWithInitArgs]], dict[str, WorkerGroup]]


def core_roles(config: PPOConfig, device: str) -> dict[str, ClassWithInitArgs]:
    """Actor with rollout engine, and the frozen reference where the config uses one.

    The reference comes first: models are built in this order, so that the engine can measure free memory last.
    """
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    roles: dict[str, ClassWithInitArgs] = {}
    if config.use_reference:
        roles[REF] = ClassWithInitArgs(ActorRolloutRefWorker, config.actor_rollout_ref, role=REF, device=device)
    roles[ACTOR_ROLLOUT] = ClassWithInitArgs(
        ActorRolloutRefWorker, config.actor_rollout_ref, role=ACTOR_ROLLOUT, device=device
    )
    return roles


def local_worker_groups(roles: Mapping[str, ClassWithInitArgs]) -> dict[str, WorkerGroup]:
    """Every role on one rank inside this process."""
    from verl.single_controller.local import create_local_colocated

    return dict(create_local_colocated(dict(roles)))


class RayWorkerGroups:
    """Factory of co-located Ray worker groups: ``nnodes * n_gpus_per_node`` actors, each holding every role."""

    def __init__(self, config: PPOConfig, device: str) -> None:
        self._trainer = config.trainer
        self._device = device
        self._group: RayWorkerGroup | None = None
        self._pool: RayResourcePool | None = None

    def __call__(self, roles: Mapping[str, ClassWithInitArgs]) -> dict[str, WorkerGroup]:
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
            create_colocated_worker_cls,
        )

        self._pool = RayResourcePool(
            [self._trainer.n_gpus_per_node] * self._trainer.nnodes,
            use_gpu=self._device == "cuda",
            max_colocate_count=1,
        )
        remote = {name: RayClassWithInitArgs(spec.cls, *spec.args, **spec.kwargs) for name, spec in roles.items()}
        self._group = RayWorkerGroup(
            resource_pool=self._pool,
            ray_cls_with_init=create_colocated_worker_cls(remote),
            ray_wait_register_center_timeout=self._trainer.ray_wait_register_center_timeout,
            device_name=self._device,
        )
        return dict(self._group.spawn(prefix_set=list(roles)))

    def close(self) -> None:
        """End the actors and give their resources back, so that a Ray that was up before is left as it was."""
        if self._group is not None:
            self._group.shutdown()
        if self._pool is not None:
            self._pool.shutdown()
        self._group = self._pool = None


def merge_roles(*parts: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    """Union of role tables.

    Raises:
        UserError: two of them use the same role name.
    """
    merged: dict[str, ClassWithInitArgs] = {}
    for part in parts:
        for name, spec in part.items():
            if name in merged:
                raise UserError(f"two recipes add a worker role named {name!r}; disable one of them")
            merged[name] = spec
    return merged
