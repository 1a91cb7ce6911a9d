# SPDX-License-Identifier: Apache-2.0
"""Config sections of the worker roles: actor, reference, rollout, critic, reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl.trainer.config.fields import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Range,
)
from verl.trainer.config.model_sections import (
    CheckpointConfig,
    CriticModelConfig,
    CriticOptimConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    RewardModelModelConfig,
    Strategy,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "CriticConfig",
    "CustomRewardFunctionConfig",
    "EngineKwargsConfig",
    "KLKind",
    "LossAggMode",
    "MultiTurnConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SandboxFusionConfig",
    "ValKwargsConfig",
]

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"]
EngineDtype = Literal["bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32", "float"]


@dataclass(frozen=True)
class PolicyLossConfig:
    """Choice of the policy loss."""

    loss_mode: str = "vanilla"
    """A name of the policy-loss registry (`verl.trainer.ppo.core_algos`)."""


@dataclass(frozen=True)
class ActorConfig:
    """Policy update."""

    strategy: Strategy = "fsdp"
    """Also decides the reference policy's strategy."""
    ppo_mini_batch_size: PositiveInt = 256
    """Rows per optimizer step over all ranks."""
    ppo_micro_batch_size: PositiveInt | None = None
    """Old global form of the next key; set exactly one of the two."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows per forward/backward on one rank."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by a token budget."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """That budget, in tokens."""
    grad_clip: PositiveFloat = 1.0
    clip_ratio: PositiveFloat = 0.2
    """Used where low or high is null."""
    clip_ratio_low: PositiveFloat | None = 0.2
    clip_ratio_high: PositiveFloat | None = 0.2
    clip_ratio_c: Annotated[float, Range(low=1, strict=True)] = 3.0
    """Constant of the dual clip."""
    loss_agg_mode: LossAggMode = "token-mean"
    entropy_coeff: float = 0.001
    """0 skips the entropy computation in the update."""
    use_invalid_action_penalty: bool = True
    invalid_action_penalty_coef: NonNegativeFloat = 0.1
    use_kl_loss: bool = False
    """Adds KL(policy, reference) to the loss; creates a reference policy."""
    use_torch_compile: bool = True
    """A hint about speed, never about results; nothing is compiled in this version."""
    kl_loss_coef: float = 0.001
    kl_loss_type: KLKind = "low_var_kl"
    ppo_epochs: PositiveInt = 1
    """Passes over the batch of one step."""
    shuffle: bool = False
    """Accepted for old scripts, not read."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)

    @property
    def clip_low(self) -> float:
        """Lower clip width: `clip_ratio_low`, or `clip_ratio` where that is null."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip width: `clip_ratio_high`, or `clip_ratio` where that is null."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class RefConfig:
    """Frozen reference policy."""

    strategy: Strategy = "fsdp"
    """Accepted for old scripts; the actor's strategy is used."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    use_torch_compile: bool = True
    log_prob_micro_batch_size: PositiveInt | None = None
    """Old global form of the next key; set exactly one of the two."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: PositiveInt = 16384
    ulysses_sequence_parallel_size: PositiveInt = 1


@dataclass(frozen=True)
class EngineKwargsConfig:
    """Keyword arguments handed to an engine as they are (null = left out)."""

    vllm: dict[str, Any] = field(default_factory=lambda: {"swap_space": None})
    sglang: dict[str, Any] = field(default_factory=lambda: {"attention_backend": None})


@dataclass(frozen=True)
class ValKwargsConfig:
    """Sampling in validation."""

    top_k: int = -1
    top_p: PositiveFraction = 1.0
    temperature: NonNegativeFloat = 0.0
    n: PositiveInt = 1
    """Episodes of each validation task."""
    do_sample: bool = False
    """False = greedy."""


@dataclass(frozen=True)
class MultiTurnConfig:
    """Keys of an engine's own tool loop; environments do not use it."""

    enable: bool = False
    max_turns: PositiveInt | None = None
    tool_config_path: str | None = None
    format: str = "chatml"


@dataclass(frozen=True)
class RolloutConfig:
    """Generation engine and its sampling."""

    name: Literal["vllm", "sglang", "hf"] = "vllm"
    mode: Literal["sync", "async"] = "sync"
    """async: the episodes are played in two parts, one generates while the other's environments step. Same data."""
    chat_scheduler: str | None = None
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; also divides the logits of every log-prob pass."""
    top_k: int = -1
    """<= 0 = off."""
    top_p: PositiveFraction = 1.0
    use_fire_sampling: bool = False
    prompt_length: PositiveInt = 512
    """P, = data.max_prompt_length; another value is refused."""
    response_length: PositiveInt = 512
    """R, = data.max_response_length."""
    dtype: EngineDtype = "bfloat16"
    """Dtype of the engine's weights on CUDA; on the CPU they have the policy's own."""
    gpu_memory_utilization: Fraction = 0.5
    """vllm: share of a GPU for weights and key/value cache; on the CPU VLLM_CPU_KVCACHE_SPACE (GiB) counts."""
    ignore_eos: bool = False
    enforce_eager: bool = True
    """vllm: neither graphs nor compilation."""
    free_cache_engine: bool = True
    """vllm: weights and cache leave the GPU between rollouts."""
    load_format: str = "dummy_dtensor"
    """vllm: dummy_* starts with random weights and takes the policy's; other formats read the folder first."""
    layered_summon: bool = False
    """Accepted; weights always go over one at a time."""
    tensor_model_parallel_size: PositiveInt = 2
    """vllm: ranks that share one engine; divides the number of ranks."""
    max_num_batched_tokens: PositiveInt = 8192
    max_model_len: PositiveInt | None = None
    """null = prompt_length + response_length."""
    max_num_seqs: PositiveInt = 1024
    """Rows that are decoded at the same time."""
    log_prob_micro_batch_size: PositiveInt | None = None
    """Old global form of the next key; set exactly one of the two."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: PositiveInt = 16384
    disable_log_stats: bool = True
    enable_chunked_prefill: bool = True
    do_sample: bool = True
    """Default of the HF engine; the call's meta_info wins."""
    n: PositiveInt = 1
    """Must stay 1: groups come from env.rollout.n."""
    engine_kwargs: EngineKwargsConfig = field(default_factory=EngineKwargsConfig)
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    seed: int | None = None
    """Seed of the sampling; null = env.seed."""
    weight_probe: bool = True
    """After every weight sync, compare the engine's log-probs of a short fixed prompt with the policy's."""
    weight_probe_tolerance: PositiveFloat | None = None
    """Allowed mean absolute difference; null = by dtype (5e-4 float32, 3e-2 float16, 0.25 bfloat16)."""
    limit_images: PositiveInt | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    min_p: Fraction | None = None
    min_tokens: PositiveInt | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: PositiveFloat | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None

    @property
    def max_row_length(self) -> int:
        """Tokens that prompt and response can have together."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """Everything the policy workers need."""

    hybrid_engine: bool = True
    """Must be True: actor and rollout share their processes."""
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True)
class CriticConfig:
    """Value model, used by the estimator `gae` only."""

    rollout_n: PositiveInt = 1
    strategy: Strategy = "fsdp"
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: PositiveInt = 256
    ppo_micro_batch_size: PositiveInt | None = None
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    forward_micro_batch_size: PositiveInt | None = None
    forward_micro_batch_size_per_gpu: PositiveInt | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    forward_max_token_len_per_gpu: PositiveInt = 32768
    ulysses_sequence_parallel_size: PositiveInt = 1
    ppo_epochs: PositiveInt = 1
    shuffle: bool = False
    grad_clip: PositiveFloat = 1.0
    cliprange_value: PositiveFloat = 0.5
    loss_agg_mode: LossAggMode = "token-mean"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass(frozen=True)
class SandboxFusionConfig:
    """Code-execution service; accepted for old scripts, not read."""

    url: str | None = None
    max_concurrent: PositiveInt = 64


@dataclass(frozen=True)
class RewardModelConfig:
    """Reward manager, and the keys of a reward model that this version does not run."""

    enable: bool = False
    strategy: Strategy = "fsdp"
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    micro_batch_size: PositiveInt | None = None
    micro_batch_size_per_gpu: PositiveInt | None = None
    max_length: PositiveInt | None = None
    ulysses_sequence_parallel_size: PositiveInt = 1
    use_dynamic_bsz: bool = False
    forward_max_token_len_per_gpu: PositiveInt = 32768
    reward_manager: str = "episode"
    launch_reward_fn_async: bool = False
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    reward_kwargs: dict[str, Any] | None = None
    overlong_buffer: dict[str, Any] | None = None


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    """A user's scoring function; accepted for old scripts, not read by the episode reward manager."""

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
