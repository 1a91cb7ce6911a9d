# SPDX-License-Identifier: Apache-2.0
"""The worker roles of a run and the two ways to start them: Ray actors, or one rank inside this process.

A factory takes ``role -> ClassWithInitArgs`` and returns ``role -> WorkerGroup``; all roles share their processes and
devices. The trainer gets the factory, so that tests of the algorithm need no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.trainer.ppo.columns import MODEL_COLUMNS
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
    from verl.trainer.config.schema import PPOConfig

ACTOR_ROLLOUT = "actor_rollout"
REF = "ref"
CRITIC = "critic"

WorkerGroupFactory = Callable[[Mapping[str, ClassWithInitArgs]], dict[str, WorkerGroup]]


def core_roles(config: PPOConfig, device: str, use_critic: bool = False) -> dict[str, ClassWithInitArgs]:
    """The value model where the estimator needs one, the frozen reference where the config uses one, the policy.

    With LoRA there is no reference role: the policy without its adapters is the reference. The policy comes last:
    models are built in this order, so that the engine can measure free memory last.
    """
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    policy = config.actor_rollout_ref
    roles: dict[str, ClassWithInitArgs] = {}
    if use_critic:
        from verl.workers.fsdp_workers import CriticWorker

        roles[CRITIC] = ClassWithInitArgs(CriticWorker, config.critic, device=device)
    if config.use_reference and policy.model.lora_rank == 0:
        roles[REF] = ClassWithInitArgs(ActorRolloutRefWorker, policy, role=REF, device=device)
    roles[ACTOR_ROLLOUT] = ClassWithInitArgs(ActorRolloutRefWorker, policy, role=ACTOR_ROLLOUT, device=device)
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


def score_rows(
    method: Callable[[DataProto], DataProto], batch: DataProto, *, world_size: int, temperature: float
) -> DataProto:
    """Let the ranks score all rows, in equal shares, without a gradient; results in row order.

    Args:
        method: of a worker group, such as ``compute_log_prob`` (``old_log_probs`` and ``entropys``, both ``(B, R)``).
        batch: ``input_ids``, ``attention_mask``, ``position_ids`` ``(B, P + R)`` and ``responses`` ``(B, R)``; other
            columns are left behind. ``B`` need not divide by the number of ranks.
        world_size: ranks of the group.
        temperature: of the log-probabilities; the rollout's, to compare with those of the step.
    """
    rows = batch.select(batch_keys=list(MODEL_COLUMNS), non_tensor_batch_keys=[], meta_info_keys=[])
    rows.meta_info = {"temperature": temperature}
    padded, added = pad_dataproto_to_divisor(rows, world_size)
    result = unpad_dataproto(method(padded), added)
    result.meta_info = {}
    return result


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
