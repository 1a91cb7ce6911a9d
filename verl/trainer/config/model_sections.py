# SPDX-License-Identifier: Apache-2.0
"""Config sections shared by all model roles: model source, optimizer, FSDP, checkpoint contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from verl.trainer.config.fields import (
    NULL_MEANS_DEFAULT,
    Dtype,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)

__all__ = [
    "CheckpointConfig",
    "CheckpointItem",
    "CriticModelConfig",
    "CriticOptimConfig",
    "FSDPConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardModelModelConfig",
    "Strategy",
    "WrapPolicyConfig",
]

Strategy = Literal["fsdp", "fsdp2"]
CheckpointItem = Literal["model", "optimizer", "extra", "hf_model"]


@dataclass(frozen=True)
class WrapPolicyConfig:
    """Which modules become FSDP units."""

    min_num_params: NonNegativeInt = 0
    """0: one unit per transformer layer; otherwise modules of at least that many parameters."""


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """Dtypes of FSDP's mixed precision."""

    param_dtype: Dtype = "bf16"
    reduce_dtype: Dtype = "fp32"
    buffer_dtype: Dtype = "fp32"


@dataclass(frozen=True)
class FSDPConfig:
    """Sharding of one model; keys that make no sense for a role are simply absent from its YAML."""

    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    param_offload: bool = False
    """Keep the weights in host memory between phases."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory between updates."""
    offload_policy: bool = False
    """fsdp2: CPUOffloadPolicy."""
    reshard_after_forward: bool = True
    """fsdp2: free the gathered weights after the forward pass."""
    fsdp_size: int = -1
    """Ranks of one shard group; -1 = all."""
    model_dtype: Dtype = field(default="fp32", metadata=NULL_MEANS_DEFAULT)
    """Dtype of the stored weights."""
    mixed_precision: MixedPrecisionConfig | None = None
    """null = bfloat16 computation on CUDA, float32 on the CPU."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: NonNegativeFloat = 1e-6
    lr_warmup_steps: int = field(default=-1, metadata=NULL_MEANS_DEFAULT)
    """A value >= 0 wins over the ratio."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up steps = int(ratio * total steps)."""
    min_lr_ratio: Fraction = field(default=0.0, metadata=NULL_MEANS_DEFAULT)
    """Final lr over peak lr, cosine only."""
    num_cycles: NonNegativeFloat = 0.5
    """Cosine only."""
    warmup_style: Literal["constant", "cosine"] = "constant"
    total_training_steps: int = -1
    """Written by the trainer; -1 = not known yet."""
    weight_decay: NonNegativeFloat = 0.01
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata=NULL_MEANS_DEFAULT)


@dataclass(frozen=True)
class CriticOptimConfig(OptimConfig):
    """The critic's optimizer: another default lr."""

    lr: NonNegativeFloat = 1e-5


@dataclass(frozen=True)
class CheckpointConfig:
    """What a checkpoint of one role holds."""

    contents: tuple[CheckpointItem, ...] = ("model", "optimizer", "extra")
    """model, optimizer and extra are needed; hf_model adds a Hugging Face folder."""


@dataclass(frozen=True)
class ModelConfig:
    """Source of the policy and how it is run."""

    path: str = "~/models/deepseek-llm-7b-chat"
    """Local folder or Hugging Face id."""
    use_shm: bool = False
    """Copy the weights to /dev/shm first."""
    external_lib: str | tuple[str, ...] | None = None
    """Module(s) imported in each worker first."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Keys put over the model's Hugging Face config."""
    enable_gradient_checkpointing: bool = True
    enable_activation_offload: bool = False
    use_remove_padding: bool = False
    """Pack rows into one sequence without padding."""
    lora_rank: NonNegativeInt = 0
    """0 = full fine-tuning."""
    lora_alpha: PositiveInt = 16
    target_modules: str | tuple[str, ...] = "all-linear"
    use_liger: bool = False
    use_fused_kernels: bool = False
    fused_kernel_options: dict[str, Any] | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class CriticModelConfig:
    """Source of the value model."""

    path: str = "~/models/deepseek-llm-7b-chat"
    use_shm: bool = False
    tokenizer_path: str = "~/models/deepseek-llm-7b-chat"
    override_config: dict[str, Any] = field(default_factory=dict)
    external_lib: str | tuple[str, ...] | None = None
    enable_gradient_checkpointing: bool = True
    enable_activation_offload: bool = False
    use_remove_padding: bool = False
    trust_remote_code: bool = False
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveInt = 16
    target_modules: str | tuple[str, ...] = "all-linear"


@dataclass(frozen=True)
class RewardModelModelConfig:
    """Keys of the reward model; accepted for old scripts, no part of this version reads them."""

    input_tokenizer: str | None = "~/models/deepseek-llm-7b-chat"
    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"
    use_shm: bool = False
    external_lib: str | tuple[str, ...] | None = None
    use_remove_padding: bool = False
    use_fused_kernels: bool = False
    trust_remote_code: bool = False
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
