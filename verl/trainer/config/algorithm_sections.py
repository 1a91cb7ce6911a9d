# SPDX-License-Identifier: Apache-2.0
"""Config sections of the algorithm: advantages, KL control, which rows teach and how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from verl.trainer.config.fields import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from verl.trainer.config.worker_sections import KLKind

__all__ = [
    "AlgorithmConfig",
    "FilterGroupsConfig",
    "GiGPOConfig",
    "HGPOConfig",
    "KLCtrlConfig",
    "PFPPOConfig",
    "RolloutCorrectionConfig",
]


@dataclass(frozen=True)
class KLCtrlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NonNegativeFloat = 0.001
    horizon: PositiveInt = 10000
    target_kl: PositiveFloat = 0.1


@dataclass(frozen=True)
class PFPPOConfig:
    """Resampling of rows by reward, with `gae` only."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: NonNegativeFloat = 2.0


@dataclass(frozen=True)
class GiGPOConfig:
    """Step-level groups of equal observations."""

    step_advantage_w: float = 1.0
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    enable_similarity: bool = False
    similarity_thresh: Fraction = 0.95


@dataclass(frozen=True)
class HGPOConfig:
    """Groups keyed by history."""

    mode: Literal["mean_norm", "mean_std_norm"] = "mean_std_norm"
    weight_type: str = "length"
    """Accepted for old scripts, not read: groups are weighted by history length."""
    length_weight_alpha: float = 1.0
    """Exponent of those weights."""
    base_group: bool = False
    """Adds the whole task as a group, as GRPO has it."""
    history_length: int = 2
    """Past observations that tell groups apart; follows env.history_length."""


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling: train on groups whose episodes differ (`verl.trainer.ppo.dynamic_sampling`)."""

    enable: bool = False
    max_num_gen_batches: int = 10
    """Generation batches per step; what is then missing is filled up with other groups. <= 0 = until full."""
    metric: str | None = None
    """Column that has to differ; null (or `acc`, `score`, `seq_reward`, as scripts write) = the episode's reward."""


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What is done about the engine sampling from another distribution than the policy's
    (`verl.trainer.ppo.rollout_correction`)."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Truncated importance weights of tokens, or of whole rows; null = none."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Their cap."""
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    """Rejection of tokens, or of rows by their ratio or its geometric mean over tokens; null = none."""
    rollout_rs_threshold: PositiveFloat | None = None
    """Largest ratio that is kept; null = rollout_is_threshold."""
    rollout_rs_threshold_lower: PositiveFloat | None = None
    """Smallest ratio that is kept; null = 1 / the largest."""

    @property
    def is_on(self) -> bool:
        """Whether anything is corrected."""
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio that rejection keeps."""
        high = self.rollout_rs_threshold or self.rollout_is_threshold
        return self.rollout_rs_threshold_lower or 1.0 / high, high


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantage estimation."""

    gamma: Fraction = 1.0
    """Discount over tokens (gae, reinforce_plus_plus) and over steps (gigpo, hgpo)."""
    lam: Fraction = 1.0
    adv_estimator: str = "gae"
    """A name of the estimator registry (`verl.trainer.ppo.core_algos`)."""
    norm_adv_by_std_in_grpo: bool = True
    compute_mean_std_cross_steps: bool = True
    """True: every turn counts in group statistics; False: one entry per trajectory."""
    singleton_advantage: Literal["reference", "zero"] = "reference"
    """A group of one passes its score through, or gets zero."""
    recipe_modules: tuple[str, ...] = ("recipe.gigpo", "recipe.hgpo")
    """Modules imported at start; they register estimators, losses, hooks."""
    use_kl_in_reward: bool = False
    kl_penalty: KLKind = "kl"
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    use_pf_ppo: bool = False
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
    gigpo: GiGPOConfig = field(default_factory=GiGPOConfig)
    hgpo: HGPOConfig = field(default_factory=HGPOConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
