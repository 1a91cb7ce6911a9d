# SPDX-License-Identifier: Apache-2.0
"""Two kinds of memory on the CPU: shared memory stands for the host, private memory for the device.

The functions of `verl.utils.fsdp_utils` that the discriminator calls are replaced by ones that really copy every
weight and optimizer tensor from one to the other; where a tensor is can then be asked of the tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from recipe.traj_evolve import discriminator_worker
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.worker_groups import ACTOR_ROLLOUT, CRITIC, local_worker_groups
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

HOST, DEVICE = "host", "device"


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _copy(tensor: Tensor, place: str) -> Tensor:
    new = _local(tensor.detach()).clone()
    if place == HOST:
        new.share_memory_()
    if isinstance(tensor, DTensor):
        return DTensor.from_local(
            new, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return new


def move_model(model: nn.Module, place: str) -> None:
    model._apply(lambda tensor: _copy(tensor, place))


def move_optimizer(optimizer: Optimizer, place: str) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = _copy(value, place)


def _where(tensors: Iterable[Tensor]) -> str:
    return "+".join(sorted({HOST if _local(tensor).is_shared() else DEVICE for tensor in tensors})) or "none"


def places(model: nn.Module, optimizer: Optimizer) -> tuple[str, str]:
    """Where all weights are, and all optimizer tensors (step counters stay on the host in any case)."""
    states = (v for s in optimizer.state.values() for k, v in s.items() if isinstance(v, Tensor) and k != "step")
    return _where(model.parameters()), _where(states)


def use_two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the discriminator worker move its tensors between the two."""
    moves: dict[str, Any] = {
        "load_fsdp_model_to_gpu": lambda model, device: move_model(model, DEVICE),
        "load_fsdp_optimizer": lambda optimizer, device: move_optimizer(optimizer, DEVICE),
        "offload_fsdp_model_to_cpu": lambda model: move_model(model, HOST),
        "offload_fsdp_optimizer": lambda optimizer: move_optimizer(optimizer, HOST),
    }
    for name, move in moves.items():
        monkeypatch.setattr(discriminator_worker, name, move)
    build = discriminator_worker.DiscriminatorWorker.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.has_own_memory = True

    monkeypatch.setattr(discriminator_worker.DiscriminatorWorker, "__init__", init)


class _Moving:
    """A role that leaves the device when asked to; `trained` names the attribute that is its model."""

    trained: str

    @register(Dispatch.ONE_TO_ALL)
    def release_device_memory(self) -> None:
        self._move(HOST)

    @register(Dispatch.ONE_TO_ALL)
    def restore_device_memory(self) -> None:
        self._move(DEVICE)

    def _move(self, place: str) -> None:
        worker: Any = self
        move_model(getattr(worker, self.trained), place)
        move_optimizer(worker.optimizer, place)


class MovingActor(_Moving, ActorRolloutRefWorker):
    trained = "actor_model"


class MovingCritic(_Moving, CriticWorker):
    trained = "model"


def groups_that_move(roles: Mapping[str, ClassWithInitArgs]) -> dict[str, WorkerGroup]:
    """In-process worker groups whose policy and critic are such roles."""
    classes = {ACTOR_ROLLOUT: MovingActor, CRITIC: MovingCritic}
    moving = {
        role: ClassWithInitArgs(classes[role], *spec.args, **spec.kwargs)
        for role, spec in roles.items()
        if role in classes
    }
    return local_worker_groups({**roles, **moving})


def watch(model: nn.Module, optimizer: Optimizer, name: str, report: Any) -> None:
    """Call `report(event)` before every forward pass and every optimizer step."""

    def forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        report(f"{name} {'training' if torch.is_grad_enabled() else 'scoring'} pass")

    # Before FSDP's own hook: the weights are the shards then.
    model.register_forward_pre_hook(forward, prepend=True, with_kwargs=True)
    optimizer.register_step_pre_hook(lambda *_: report(f"{name} step"))
