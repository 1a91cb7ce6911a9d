# SPDX-License-Identifier: Apache-2.0
"""Config of the generation program (`generation.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from verl.trainer.config.fields import NULL_MEANS_DEFAULT, PositiveFraction, PositiveInt, RootConfig
from verl.trainer.config.model_sections import FSDPConfig, ModelConfig, Strategy
from verl.trainer.config.ppo_sections import PPOConfig
from verl.trainer.config.run_sections import RayInitConfig, TrainerConfig
from verl.trainer.config.validate import check_remote, refuse, unsupported_engine
from verl.trainer.config.worker_sections import ActorConfig, ActorRolloutRefConfig, RolloutConfig

__all__ = [
    "GenerationActorConfig",
    "GenerationConfig",
    "GenerationDataConfig",
    "GenerationModelConfig",
    "GenerationRolloutConfig",
    "GenerationTrainerConfig",
    "validate_generation_config",
]

_FSDP_DTYPES: dict[str, Literal["bfloat16", "float16", "float32"]] = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
}


@dataclass(frozen=True)
class GenerationTrainerConfig:
    """Where the model runs."""

    nnodes: PositiveInt = 1
    n_gpus_per_node: PositiveInt = 8
    """Ranks per node, also on the CPU."""
    device: Literal["cuda", "cpu", "auto"] = "cuda"


@dataclass(frozen=True)
class GenerationDataConfig:
    """Prompts in, responses out."""

    path: str = "~/data/rlhf/math/test.parquet"
    prompt_key: str = "prompt"
    """Column with chat messages or texts."""
    n_samples: PositiveInt = 5
    """Responses of each prompt."""
    output_path: str = "~/data/rlhf/math/responses.parquet"
    """The rows of `path` with one more column, `responses`: a list of `n_samples` texts."""
    batch_size: PositiveInt = 128
    """Prompts at a time; results do not depend on it."""
    truncation: Literal["error", "left", "right"] = "error"
    """For prompts longer than rollout.prompt_length."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationModelConfig:
    """Source of the model."""

    path: str = "~/models/Qwen2-7B-Instruct"
    """Local folder or Hugging Face id."""
    external_lib: str | tuple[str, ...] | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = field(default=False, metadata=NULL_MEANS_DEFAULT)


@dataclass(frozen=True)
class GenerationRolloutConfig(RolloutConfig):
    """The engine and its sampling; other defaults than in training."""

    top_k: int = 50
    top_p: PositiveFraction = 0.7
    prompt_length: PositiveInt = 1536
    response_length: PositiveInt = 512
    tensor_model_parallel_size: PositiveInt = 1


@dataclass(frozen=True)
class GenerationActorConfig:
    """Sharding of the model that the engine takes its weights from."""

    strategy: Strategy = "fsdp2"
    ulysses_sequence_parallel_size: PositiveInt = 1
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass(frozen=True)
class GenerationConfig(RootConfig):
    """The whole `generation.yaml`."""

    config_name: ClassVar[str] = "generation"

    trainer: GenerationTrainerConfig = field(default_factory=GenerationTrainerConfig)
    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    model: GenerationModelConfig = field(default_factory=GenerationModelConfig)
    rollout: GenerationRolloutConfig = field(default_factory=GenerationRolloutConfig)
    actor: GenerationActorConfig = field(default_factory=GenerationActorConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    def worker_config(self, device: str) -> PPOConfig:
        """The same choices as the config that the worker groups of training take; `device` is `cpu` or `cuda`."""
        model = ModelConfig(
            path=self.model.path,
            external_lib=self.model.external_lib,
            override_config=self.model.override_config,
            trust_remote_code=self.model.trust_remote_code,
            enable_gradient_checkpointing=False,
        )
        fsdp_config = self.actor.fsdp_config
        if device == "cuda":
            # The weights are only copied into the engine, so they are stored as it wants them.
            fsdp_config = replace(fsdp_config, model_dtype=_FSDP_DTYPES[self.rollout.dtype])
        policy = ActorRolloutRefConfig(
            model=model,
            actor=ActorConfig(strategy=self.actor.strategy, ppo_micro_batch_size_per_gpu=1, fsdp_config=fsdp_config),
            rollout=replace(self.rollout, log_prob_micro_batch_size_per_gpu=1),
        )
        trainer = TrainerConfig(
            nnodes=self.trainer.nnodes, n_gpus_per_node=self.trainer.n_gpus_per_node, device=self.trainer.device
        )
        return replace(PPOConfig(), actor_rollout_ref=policy, trainer=trainer, ray_init=self.ray_init)


def validate_generation_config(cfg: GenerationConfig) -> None:
    """Raise UserError for the first combination in `cfg` that this version cannot run."""
    ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    refuse(unsupported_engine(cfg.rollout, "rollout", ranks))
    size = cfg.actor.fsdp_config.fsdp_size
    samples = cfg.data.n_samples
    greedy = not cfg.rollout.do_sample or cfg.rollout.temperature == 0
    refuse(
        [
            (
                cfg.rollout.mode != "sync",
                f"rollout.mode={cfg.rollout.mode} overlaps generation with environments, and there are none here; set "
                "rollout.mode=sync.",
            ),
            (
                cfg.rollout.n != 1,
                f"rollout.n={cfg.rollout.n} is not read here; leave it at 1 and set data.n_samples to the number of "
                "responses per prompt.",
            ),
            (
                greedy and samples > 1,
                f"data.n_samples={samples} responses of greedy decoding are all the same; set data.n_samples=1, or "
                "rollout.do_sample=True with rollout.temperature above 0.",
            ),
            (
                cfg.actor.ulysses_sequence_parallel_size > 1,
                "actor.ulysses_sequence_parallel_size above 1 is not available; set it to 1.",
            ),
            (
                size != -1 and (size < 1 or ranks % size != 0),
                f"actor.fsdp_config.fsdp_size={size} does not divide the {ranks} ranks; set -1 for one shard group.",
            ),
        ]
    )
    check_remote({"data.path": cfg.data.path, "data.output_path": cfg.data.output_path, "model.path": cfg.model.path})
