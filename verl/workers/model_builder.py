# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder to a sharded model with optimizer and schedule; shared by every role.

All of it expects the default process group (`verl.utils.distributed.initialize_process_group`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers.utils.logging as hf_logging
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from verl.trainer.config.model_sections import FSDPConfig, OptimConfig
from verl.utils.errors import UserError
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import apply_fsdp1, apply_fsdp2, create_device_mesh
from verl.utils.import_utils import is_installed
from verl.utils.lora import LoRASettings, add_adapters
from verl.utils.model import print_model_size, update_model_config
from verl.utils.selected_logits import output_head
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.packed_attention import PACKED_SDPA, check_can_pack

__all__ = [
    "Precision",
    "apply_liger",
    "build_lr_scheduler",
    "build_model",
    "build_optimizer",
    "load_config",
    "load_plain_model",
    "resolve_attn_implementation",
    "resolve_precision",
    "shard_model",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Precision:
    """Dtypes of one model: stored weights, computation, gradient reduction, buffers (None = as stored)."""

    model: torch.dtype = torch.float32
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None


def resolve_precision(config: FSDPConfig, device: torch.device) -> Precision:
    """Dtypes of ``fsdp_config``: without ``mixed_precision``, bfloat16 computation on CUDA and float32 on the CPU."""
    stored = PrecisionType.to_dtype(config.model_dtype, "fsdp_config.model_dtype")
    mixed = config.mixed_precision
    if mixed is not None:
        return Precision(
            stored,
            PrecisionType.to_dtype(mixed.param_dtype, "fsdp_config.mixed_precision.param_dtype"),
            PrecisionType.to_dtype(mixed.reduce_dtype, "fsdp_config.mixed_precision.reduce_dtype"),
            PrecisionType.to_dtype(mixed.buffer_dtype, "fsdp_config.mixed_precision.buffer_dtype"),
        )
    if device.type == "cuda":
        return Precision(stored, torch.bfloat16, torch.float32, torch.float32)
    return Precision(stored)


def resolve_attn_implementation(
    device: torch.device, requested: str | None = None, *, packed: bool = False, half_precision: bool = True
) -> str:
    """``requested``, else flash-attention 2 on CUDA where it is installed, else SDPA.

    Args:
        requested: a transformers name, from ``override_config.attn_implementation``.
        packed: rows come packed into one sequence; SDPA then takes them apart (`verl.workers.packed_attention`).
        half_precision: whether computation is in bfloat16 or float16, the only types flash-attention takes.

    Raises:
        UserError: flash-attention is asked for where it cannot run, or packing with an attention that cannot.
    """
    key = "override_config.attn_implementation"
    can_flash = device.type == "cuda" and half_precision and is_installed("flash_attn")
    name = requested or ("flash_attention_2" if can_flash else "sdpa")
    if name == "flash_attention_2" and not can_flash:
        raise UserError(
            f"{key}={name} needs a CUDA device, computation in bfloat16 or float16 and the package flash-attn; "
            f"set {key}=sdpa"
        )
    if not packed or name.startswith("flash_attention"):
        return name
    if name != "sdpa":
        raise UserError(f"{key}={name} cannot keep packed rows apart; set it to sdpa, or use_remove_padding=False")
    return PACKED_SDPA


def _unloadable(path: str, config_key: str, error: Exception, kind: str = "causal language model") -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"{config_key}={path}: no {kind} could be loaded from there ({reason}); set {config_key} to a "
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
    """Hugging Face configuration of a model with the overrides applied (``attn_implementation`` is the argument).

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
    overrides = {key: value for key, value in (override_config or {}).items() if key != "attn_implementation"}
    update_model_config(config, overrides)
    return config


def load_plain_model(
    path: str,
    *,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    trust_remote_code: bool = False,
    value_head: bool = False,
    config_key: str = "actor_rollout_ref.model.path",
    **config_options: Any,
) -> PreTrainedModel:
    """Unsharded model on the CPU; ``config_options`` go to `load_config` when no config is given.

    Args:
        dtype: of the loaded weights; ``auto`` is the folder's own.
        value_head: a token classifier with one label instead of a causal language model. A head that the folder lacks
            starts at zero, so that the first values are 0 rather than noise.

    Raises:
        UserError: nothing loadable is there.
    """
    if config is None:
        config = load_config(path, trust_remote_code=trust_remote_code, config_key=config_key, **config_options)
    location = copy_to_local(path, config_key)
    hf_logging.disable_progress_bar()
    if value_head:
        # Dropout in front of the head would make values differ between scoring and training.
        update_model_config(config, {"num_labels": 1, "classifier_dropout": 0.0, "hidden_dropout": 0.0})
    auto_class = AutoModelForTokenClassification if value_head else AutoModelForCausalLM
    # Weights that the folder lacks come from the process-wide generator: the same on every rank, and without moving it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            found: Any = auto_class.from_pretrained(
                location, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            kind = "model with a value per token" if value_head else "causal language model"
            raise _unloadable(path, config_key, error, kind) from error
    model: PreTrainedModel = found[0]
    if value_head:
        in_head = {id(parameter) for parameter in output_head(model).parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) in in_head and name in found[1]["missing_keys"]:
                nn.init.zeros_(parameter)
    return model


def apply_liger(model: nn.Module, device: torch.device) -> None:
    """Exchanges norms, rotary embeddings and MLPs of a model for liger's kernels, in place.

    Raises:
        UserError: the package is missing, or the device is not CUDA.
    """
    if device.type != "cuda" or not is_installed("liger_kernel"):
        raise UserError("use_liger=True needs a CUDA device and the package liger-kernel; set use_liger=False")
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    # Losses are computed outside of the model, on the logits of response tokens only.
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)


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
    partly_frozen = len({weight.requires_grad for weight in model.parameters()}) > 1
    if strategy == "fsdp" and mesh.size(-1) == 1 and partly_frozen:
        # FSDP1 with nothing to shard never turns the weights of a frozen unit back into parameters after a backward
        # pass, and fails in the next one. FSDP2 does the same job there.
        logger.warning("strategy=fsdp: with one rank and frozen weights (LoRA) the model is sharded by fsdp2 instead")
        strategy = "fsdp2"
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
    use_remove_padding: bool = False,
    use_liger: bool = False,
    lora: LoRASettings | None = None,
    value_head: bool = False,
    cpu_offload: bool | None = None,
    config_key: str = "actor_rollout_ref.model.path",
) -> nn.Module:
    """Loads a causal language model (or value model) and shards it.

    Args:
        path: Hugging Face folder or id.
        strategy: ``fsdp`` or ``fsdp2``.
        trainable: False freezes every parameter and puts the model in eval mode (reference policies).
        attn_implementation: default ``override_config.attn_implementation``, else see `resolve_attn_implementation`.
        use_remove_padding: the model will be run on packed rows only (`verl.workers.forward.RowForward`).
        lora: adapters; then only they (and a value head) train.
        value_head: a token classifier with one label, see `load_plain_model`.
        config_key: named in error messages.

    Returns:
        The sharded model; ``.config`` is its Hugging Face configuration.

    Raises:
        UserError: nothing loadable at ``path``, or an option that cannot work here.
    """
    fsdp_config = fsdp_config or FSDPConfig()
    precision = resolve_precision(fsdp_config, device)
    requested = attn_implementation or (override_config or {}).get("attn_implementation")
    half = (precision.param or precision.model) != torch.float32
    config = load_config(
        path,
        override_config=override_config,
        trust_remote_code=trust_remote_code,
        attn_implementation=resolve_attn_implementation(
            device, requested, packed=use_remove_padding, half_precision=half
        ),
        config_key=config_key,
    )
    if use_remove_padding:
        check_can_pack(config)
    model = load_plain_model(
        path,
        config=config,
        dtype=precision.model,
        trust_remote_code=trust_remote_code,
        value_head=value_head,
        config_key=config_key,
    )
    if use_liger:
        apply_liger(model, device)
    if trainable and enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.requires_grad_(trainable)
    if trainable and lora is not None:
        target_key = f"{config_key.rpartition('.')[0]}.target_modules"
        add_adapters(model, lora, target_key, value_head=value_head)
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
