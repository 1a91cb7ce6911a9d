# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder to a sharded model with optimizer and schedule; shared by every role.

All of it expects the default process group (`verl.utils.distributed.initialize_process_group`).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers.utils.logging as hf_logging
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.trainer.config.model_sections import FSDPConfig, OptimConfig
from verl.utils.errors import UserError
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import apply_fsdp1, apply_fsdp2, create_device_mesh
from verl.utils.model import print_model_size, update_model_config
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

__all__ = [
    "Precision",
    "build_lr_scheduler",
    "build_model",
    "build_optimizer",
    "load_config",
    "load_plain_model",
    "resolve_attn_implementation",
    "resolve_precision",
    "shard_model",
    "to_dtype",
]

logger = logging.getLogger(__name__)

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
}


def to_dtype(name: str, config_key: str = "dtype") -> torch.dtype:
    """Torch dtype for a config's spelling (fp32, bf16, float16, ...).

    Raises:
        UserError: unknown spelling.
    """
    if name not in _DTYPES:
        raise UserError(f"{config_key}={name}: unknown dtype; use one of {', '.join(sorted(_DTYPES))}")
    return _DTYPES[name]


@dataclass(frozen=True)
class Precision:
    """Dtypes of one model: stored weights, computation, gradient reduction, buffers (None = as stored)."""

    model: torch.dtype = torch.float32
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None


def resolve_precision(config: FSDPConfig, device: torch.device) -> Precision:
    """Dtypes of ``fsdp_config``: without ``mixed_precision``, bfloat16 computation on CUDA and float32 on the CPU."""
    stored = to_dtype(config.model_dtype, "fsdp_config.model_dtype")
    mixed = config.mixed_precision
    if mixed is not None:
        return Precision(
            stored,
            to_dtype(mixed.param_dtype, "fsdp_config.mixed_precision.param_dtype"),
            to_dtype(mixed.reduce_dtype, "fsdp_config.mixed_precision.reduce_dtype"),
            to_dtype(mixed.buffer_dtype, "fsdp_config.mixed_precision.buffer_dtype"),
        )
    if device.type == "cuda":
        return Precision(stored, torch.bfloat16, torch.float32, torch.float32)
    return Precision(stored)


def resolve_attn_implementation(device: torch.device, requested: str | None = None) -> str:
    """``requested``, else flash-attention 2 on CUDA where it is installed, else SDPA."""
    if requested is not None:
        return requested
    if device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return "sdpa"


def _unloadable(path: str, config_key: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"{config_key}={path}: no causal language model could be loaded from there ({reason}); set {config_key} to a "
        "folder with config.json and weights, or to a Hugging Face id"
    )


def load_config(
    path: str,
    *,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    config_key: str = "actor_rollout_ref.model.path",
) -> PretrainedConfig:
    """Hugging Face configuration of a model with the overrides applied.

    Raises:
        UserError: the folder is missing or holds no readable configuration; names ``config_key`` and the path.
    """
    location = copy_to_local(path, config_key)
    try:
        config = AutoConfig.from_pretrained(
            location, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
        )
    except (OSError, ValueError) as error:
        raise _unloadable(path, config_key, error) from error
    update_model_config(config, override_config or {})
    return config


def load_plain_model(
    path: str,
    *,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    config_key: str = "actor_rollout_ref.model.path",
    **config_options: Any,
) -> PreTrainedModel:
    """Unsharded causal language model on the CPU; ``config_options`` go to `load_config` when no config is given.

    Raises:
        UserError: nothing loadable is there.
    """
    if config is None:
        config = load_config(path, trust_remote_code=trust_remote_code, config_key=config_key, **config_options)
    location = copy_to_local(path, config_key)
    hf_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            location, config=config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _unloadable(path, config_key, error) from error


def shard_model(
    model: nn.Module,
    *,
    strategy: str,
    device: torch.device,
    fsdp_config: FSDPConfig,
    cpu_offload: bool | None = None,
) -> nn.Module:
    """Shards a loaded model over all ranks with FSDP1 (``fsdp``) or FSDP2 (``fsdp2``).

    ``cpu_offload``: shards live in host memory and are fetched per layer; default ``fsdp_config.offload_policy``.
    """
    precision = resolve_precision(fsdp_config, device)
    mesh = create_device_mesh(dist.get_world_size(), fsdp_config.fsdp_size, device.type)
    offload = device.type == "cuda" and (fsdp_config.offload_policy if cpu_offload is None else cpu_offload)
    min_num_params = fsdp_config.wrap_policy.min_num_params
    if strategy == "fsdp":
        return apply_fsdp1(
            model,
            mesh,
            device,
            param_dtype=precision.param,
            reduce_dtype=precision.reduce,
            buffer_dtype=precision.buffer,
            min_num_params=min_num_params,
            cpu_offload=offload,
        )
    if strategy == "fsdp2":
        return apply_fsdp2(
            model,
            mesh,
            param_dtype=precision.param,
            reduce_dtype=precision.reduce,
            min_num_params=min_num_params,
            reshard_after_forward=fsdp_config.reshard_after_forward,
            cpu_offload=offload,
        )
    raise UserError(f"strategy={strategy}: use fsdp or fsdp2")


def build_model(
    path: str,
    *,
    strategy: str,
    device: torch.device,
    fsdp_config: FSDPConfig | None = None,
    trainable: bool = True,
    override_config: Mapping[str, Any] | None = None,
    enable_gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    cpu_offload: bool | None = None,
    config_key: str = "actor_rollout_ref.model.path",
) -> nn.Module:
    """Loads a causal language model and shards it.

    Args:
        path: Hugging Face folder or id.
        strategy: ``fsdp`` or ``fsdp2``.
        trainable: False freezes every parameter and puts the model in eval mode (reference policies).
        attn_implementation: default flash-attention 2 on CUDA where installed, else SDPA.
        config_key: named in error messages.

    Returns:
        The sharded model; ``.config`` is its Hugging Face configuration.

    Raises:
        UserError: nothing loadable at ``path``.
    """
    fsdp_config = fsdp_config or FSDPConfig()
    config = load_config(
        path,
        override_config=override_config,
        trust_remote_code=trust_remote_code,
        attn_implementation=resolve_attn_implementation(device, attn_implementation),
        config_key=config_key,
    )
    model = load_plain_model(
        path,
        config=config,
        dtype=resolve_precision(fsdp_config, device).model,
        trust_remote_code=trust_remote_code,
        config_key=config_key,
    )
    if trainable and enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.requires_grad_(trainable)
    model.train(trainable)
    print_model_size(model, path)
    return shard_model(model, strategy=strategy, device=device, fsdp_config=fsdp_config, cpu_offload=cpu_offload)


def build_optimizer(
    parameters: nn.Module | Iterable[nn.Parameter],
    *,
    lr: float,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.01,
) -> Optimizer:
    """AdamW over the trainable parameters; call it after sharding."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    first, second = betas
    return AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=lr,
        betas=(first, second),
        weight_decay=weight_decay,
    )


def build_lr_scheduler(optimizer: Optimizer, config: OptimConfig) -> LambdaLR:
    """Constant or cosine schedule with warm-up; ``lr_warmup_steps >= 0`` wins over the ratio.

    Raises:
        UserError: cosine, or a warm-up ratio, without a known ``total_training_steps``.
    """
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if total < 0 and (config.warmup_style == "cosine" or (warmup < 0 and config.lr_warmup_steps_ratio > 0)):
        raise UserError(
            "optim.total_training_steps is not known, but a cosine schedule or lr_warmup_steps_ratio needs it; set it"
        )
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total) if total > 0 else 0
    if config.warmup_style == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer, warmup, total, min_lr_ratio=config.min_lr_ratio, num_cycles=config.num_cycles
        )
    return get_constant_schedule_with_warmup(optimizer, warmup)
