# SPDX-License-Identifier: Apache-2.0
"""Config of the SFT program (`sft_trainer.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from verl.trainer.config.fields import (
    NULL_MEANS_DEFAULT,
    Dtype,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RootConfig,
)
from verl.trainer.config.model_sections import FSDPConfig, MixedPrecisionConfig, Strategy, WrapPolicyConfig
from verl.trainer.config.run_sections import CustomClsConfig

__all__ = [
    "MultiturnConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTFSDPConfig",
    "SFTModelConfig",
    "SFTOptimConfig",
    "SFTTrainerConfig",
]


@dataclass(frozen=True)
class MultiturnConfig:
    """Rows that hold whole conversations."""

    enable: bool = False
    messages_key: str = "messages"
    """Column with the message list."""


@dataclass(frozen=True)
class SFTDataConfig:
    """Rows, columns, lengths."""

    train_batch_size: PositiveInt = 256
    """Rows per optimizer step over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Accepted for old scripts, not read."""
    micro_batch_size_per_gpu: PositiveInt = 4
    """Rows per forward on one rank; also used in validation."""
    train_files: str | tuple[str, ...] = "~/data/gsm8k/train.parquet"
    val_files: str | tuple[str, ...] = "~/data/gsm8k/test.parquet"
    prompt_key: str | tuple[str, ...] = "question"
    response_key: str | tuple[str, ...] = "answer"
    prompt_dict_keys: tuple[str, ...] | None = ("question",)
    """Keys followed inside the prompt column."""
    response_dict_keys: tuple[str, ...] | None = ("answer",)
    weight_key: str | None = None
    """Column with a loss weight per row; null = every row counts once."""
    prompt_loss_weight: NonNegativeFloat = 0.0
    """Weight of predicting a prompt token, relative to a response token's 1."""
    multiturn: MultiturnConfig = field(default_factory=MultiturnConfig)
    max_length: PositiveInt = 1024
    """Tokens of prompt and response together."""
    truncation: Literal["error", "left", "right"] = "error"
    balance_dp_token: bool = False
    """Accepted, not read: the loss is always normalised by the token count of all ranks."""
    chat_template: str | None = None
    custom_cls: CustomClsConfig = field(default_factory=CustomClsConfig)
    use_shm: bool = False


@dataclass(frozen=True)
class SFTFSDPConfig:
    """Sharding of the SFT model, in the SFT program's key names."""

    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    cpu_offload: bool = False
    """Turns offloading on; `offload_params` says whether weights are included."""
    offload_params: bool = False
    model_dtype: Dtype = field(default="fp32", metadata=NULL_MEANS_DEFAULT)
    mixed_precision: MixedPrecisionConfig | None = None

    def to_fsdp_config(self) -> FSDPConfig:
        """The same choices as the section that the model builder takes."""
        return FSDPConfig(
            wrap_policy=self.wrap_policy,
            offload_policy=self.cpu_offload and self.offload_params,
            model_dtype=self.model_dtype,
            mixed_precision=self.mixed_precision,
        )


@dataclass(frozen=True)
class SFTModelConfig:
    """Source of the model and how it is run."""

    partial_pretrain: str = "~/models/gemma-1.1-7b-it"
    """Local folder or Hugging Face id."""
    use_shm: bool = False
    fsdp_config: SFTFSDPConfig = field(default_factory=SFTFSDPConfig)
    external_lib: str | tuple[str, ...] | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    enable_gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveInt = 16
    target_modules: str | tuple[str, ...] = "all-linear"
    use_liger: bool = False
    strategy: Strategy = "fsdp2"


@dataclass(frozen=True)
class SFTOptimConfig:
    """Optimizer and schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for matrices of the layers, AdamW for the rest."""
    lr: NonNegativeFloat = 1e-5
    muon_lr: PositiveFloat = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.01
    warmup_steps_ratio: Fraction = 0.1
    min_lr_ratio: Fraction = 0.0
    clip_grad: PositiveFloat = 1.0
    lr_scheduler: Literal["cosine", "wsd", "constant"] = "cosine"


@dataclass(frozen=True)
class SFTTrainerConfig:
    """Length of the run, logging, checkpoints."""

    default_local_dir: str = "/tmp/sft_model"
    default_hdfs_dir: str | None = None
    resume_path: str | None = None
    """A `global_step_N` folder, or the folder of a run for its newest complete checkpoint."""
    project_name: str = "gsm8k-sft"
    experiment_name: str = "test"
    total_epochs: PositiveInt = 4
    total_training_steps: PositiveInt | None = None
    """Stop after so many steps."""
    logger: tuple[str, ...] = ("console",)
    seed: int = 1
    device: Literal["cuda", "cpu", "auto"] = "auto"
    save_freq: int = -1
    """Steps; <= 0 = at the end only."""
    test_freq: int = -1
    """Steps; <= 0 = after each epoch only."""


@dataclass(frozen=True)
class SFTConfig(RootConfig):
    """The whole `sft_trainer.yaml`."""

    config_name: ClassVar[str] = "sft_trainer"

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    optim: SFTOptimConfig = field(default_factory=SFTOptimConfig)
    ulysses_sequence_parallel_size: PositiveInt = 1
    use_remove_padding: bool = False
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
