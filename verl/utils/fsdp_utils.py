# SPDX-License-Identifier: Apache-2.0
"""FSDP1 and FSDP2 behind the same few calls: wrap, clip, gather, offload."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from verl.utils.absent import absent_name

__all__ = [
    "MixedPrecisionPolicy",
    "apply_fsdp1",
    "apply_fsdp2",
    "clip_grad_norm",
    "create_device_mesh",
    "finite_step",
    "fsdp2_clip_grad_norm_",
    "fsdp_version",
    "full_options",
    "full_state_dict",
    "get_fsdp_wrap_policy",
    "get_sharding_strategy",
    "iter_full_parameters",
    "load_fsdp_model_to_gpu",
    "load_fsdp_optimizer",
    "move_optimizer_state",
    "offload_fsdp_model_to_cpu",
    "offload_fsdp_optimizer",
    "quiet_no_shard",
    "reshard",
    "trainable_names",
    "transformer_layer_classes",
    "wrap_units",
]

logger = logging.getLogger(__name__)


@contextmanager
def quiet_no_shard() -> Iterator[None]:
    """Hides FSDP1's notices about a group of one rank, where there is nothing to shard."""
    with warnings.catch_warnings():
        for message in ("FSDP is switching to use `NO_SHARD`", "When using ``NO_SHARD``", "The `NO_SHARD` sharding"):
            warnings.filterwarnings("ignore", message=message)
        yield


def create_device_mesh(world_size: int, fsdp_size: int, device_type: str = "cuda") -> DeviceMesh:
    """One shard group (``fsdp_size`` -1 or >= world), else a ``(ddp, fsdp)`` mesh of replicated shard groups.

    Raises:
        ValueError: ``fsdp_size`` does not divide the world size.
    """
    if fsdp_size < 0 or fsdp_size >= world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("fsdp",))
    if fsdp_size == 0 or world_size % fsdp_size:
        raise ValueError(f"fsdp_size={fsdp_size} does not divide the world size {world_size}")
    return init_device_mesh(device_type, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


def get_sharding_strategy(device_mesh: DeviceMesh) -> ShardingStrategy:
    """FSDP1 strategy that belongs to a mesh of `create_device_mesh`."""
    if device_mesh.ndim == 2:
        return ShardingStrategy.HYBRID_SHARD if device_mesh.size(1) > 1 else ShardingStrategy.NO_SHARD
    return ShardingStrategy.FULL_SHARD


def fsdp_version(model: nn.Module) -> int:
    """1 or 2 for a wrapped model, 0 for a plain one."""
    if isinstance(model, FSDP):
        return 1
    return 2 if isinstance(model, FSDPModule) else 0


def transformer_layer_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Module classes the model declares unsplittable (``_no_split_modules``): its transformer layers.

    Raises:
        ValueError: the model declares none; wrapping by size is the way out.
    """
    names: set[str] = set(model._no_split_modules or ()) if isinstance(model, PreTrainedModel) else set()
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    if not classes:
        raise ValueError(
            f"{type(model).__name__} names no transformer layers; set fsdp_config.wrap_policy.min_num_params above 0"
        )
    return classes


def wrap_units(model: nn.Module, min_num_params: int = 0) -> list[nn.Module]:
    """Modules below the root that become FSDP units, children before their parents.

    ``min_num_params`` 0: the transformer layers. Otherwise modules that hold at least so many parameters not yet in
    a unit of their own; a module with only one end of tied weights stays with the root.
    """
    if min_num_params <= 0:
        classes = tuple(transformer_layer_classes(model))
        return [module for module in model.modules() if isinstance(module, classes)]
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    units: list[nn.Module] = []

    def collect(module: nn.Module) -> int:
        """Parameters of ``module`` that are in no unit."""
        size = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(collect, module.children()))
        inside = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        whole = all(owners[key] == count for key, count in inside.items())
        if module is model or size < min_num_params or not whole or isinstance(module, nn.ModuleList):
            return size
        units.append(module)
        return 0

    collect(model)
    return units


def get_fsdp_wrap_policy(module: nn.Module, min_num_params: int = 0) -> Callable[..., bool]:
    """FSDP1 policy that wraps exactly `wrap_units`."""
    units = set(wrap_units(module, min_num_params))
    return partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__)


def apply_fsdp1(
    model: nn.Module,
    device_mesh: DeviceMesh,
    device: torch.device,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    min_num_params: int = 0,
    cpu_offload: bool = False,
) -> FSDP:
    """Wraps with FSDP1; parameters keep their names, so optimizers and state dicts see the model's own."""
    strategy = get_sharding_strategy(device_mesh)
    if strategy is ShardingStrategy.NO_SHARD:
        # Left a two-dimensional mesh with shard groups of one rank, FSDP1 would not reduce gradients at all.
        device_mesh = init_device_mesh(device_mesh.device_type, (device_mesh.size(),), mesh_dim_names=("ddp",))
    precision = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)
    with quiet_no_shard():
        return FSDP(
            model,
            device_mesh=device_mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=get_fsdp_wrap_policy(model, min_num_params),
            mixed_precision=None if param_dtype is None else precision,
            cpu_offload=CPUOffload(offload_params=True) if cpu_offload else None,
            device_id=device,
            use_orig_params=True,
            forward_prefetch=False,
        )


def apply_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    min_num_params: int = 0,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> nn.Module:
    """Shards in place: each transformer layer (or module of at least ``min_num_params``), then the rest; returns it."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        "reshard_after_forward": reshard_after_forward,
    }
    for unit in wrap_units(model, min_num_params):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def fsdp2_clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips sharded gradients by their global norm; returns that norm (before clipping) as a plain 0-d tensor."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Clips the gradients of a model under FSDP1, FSDP2 or none; returns the global norm before clipping (0-d)."""
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(max_norm)
    return fsdp2_clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)


def finite_step(model: nn.Module, optimizers: Sequence[Optimizer], max_norm: float) -> float:
    """Clips the gradients, steps and clears them; returns the global norm before clipping.

    A norm that is not finite (the same on every rank) changes neither weights nor optimizer states.
    """
    norm = float(clip_grad_norm(model, max_norm))
    if not math.isfinite(norm):
        logger.warning("the gradient norm is %s: no parameter was changed", norm)
    for optimizer in optimizers:
        if not math.isfinite(norm):
            # Without gradients a step leaves weights and moments alone, and schedules know that it was called.
            optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights of every FSDP2 unit; nothing to do for other models."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_options(model: nn.Module) -> StateDictOptions:
    """How torch gathers unsharded states into the host memory of rank 0."""
    # FSDP1 asked to move tensors to the CPU that are there already returns freed memory (a crash in torch 2.13).
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return StateDictOptions(full_state_dict=True, cpu_offload=not on_cpu)


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """Unsharded weights under the plain model's names; a collective.

    ``rank0_only``: on the CPU of rank 0, empty on the other ranks. Otherwise every rank gets all of them.
    """
    options = full_options(model) if rank0_only else StateDictOptions(full_state_dict=True)
    with quiet_no_shard():
        state = get_model_state_dict(model, options=options)
    if rank0_only and dist.is_initialized() and dist.get_rank() != 0:
        return {}
    return state  # type: ignore[return-value]


def trainable_names(model: nn.Module) -> set[str]:
    """Plain model's names of the parameters that train."""
    return {
        name.replace("_fsdp_wrapped_module.", "") for name, weight in model.named_parameters() if weight.requires_grad
    }


def iter_full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``(name, unsharded detached weight)`` on every rank; a collective that must be consumed to the end.

    One tensor is unsharded at a time. With nothing to gather, FSDP2 and plain models yield tensors that share the
    parameters' memory; FSDP1 without shards copies the whole state first.
    """
    if isinstance(model, FSDP):
        is_sharded = model.sharding_strategy is not ShardingStrategy.NO_SHARD
        state: dict[str, Any] = get_model_state_dict(model) if is_sharded else full_state_dict(model)
        for name, tensor in state.items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return
    reshard(model)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if not isinstance(weight, DTensor):
            yield name, weight
        elif weight.device_mesh.size() == 1:
            yield name, weight.to_local()
        else:
            yield name, weight.full_tensor()


def offload_fsdp_model_to_cpu(model: nn.Module) -> None:
    """Moves the sharded weights of a CUDA model to host memory (nothing to do on the CPU)."""
    _move_model(model, torch.device("cpu"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module, device: torch.device | None = None) -> None:
    """Brings the weights back to the computing device."""
    _move_model(model, device or torch.device("cuda", torch.cuda.current_device()))


def _move_model(model: nn.Module, device: torch.device) -> None:
    if not isinstance(model, FSDP):
        model.to(device)
        return
    for unit in FSDP.fsdp_modules(model):
        handle = unit._handle
        if handle is None:
            continue
        handle.flat_param_to(device, non_blocking=False)
        # FSDP1 keeps a second reference to the shard and restores the parameter from it.
        handle.flat_param._local_shard = handle.flat_param.data


def move_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Moves all state tensors except the step counters, which AdamW keeps on the CPU."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(device)


def offload_fsdp_optimizer(optimizer: Optimizer) -> None:
    """Moves optimizer state to host memory."""
    move_optimizer_state(optimizer, torch.device("cpu"))


def load_fsdp_optimizer(optimizer: Optimizer, device_id: torch.device | int) -> None:
    """Brings optimizer state to the device of the step."""
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
    move_optimizer_state(optimizer, device)


def __getattr__(name: str) -> Any:
    absent_name(__name__, name)
