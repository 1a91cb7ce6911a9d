# SPDX-License-Identifier: Apache-2.0
"""Config of the RL program (`ppo_trainer.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from verl.trainer.config.algorithm_sections import AlgorithmConfig
from verl.trainer.config.fields import RootConfig
from verl.trainer.config.run_sections import DataConfig, EnvConfig, RayInitConfig, TrainerConfig
from verl.trainer.config.worker_sections import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    CustomRewardFunctionConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)

__all__ = ["PPOConfig"]

SectionT = TypeVar("SectionT", ActorConfig, RefConfig, RolloutConfig, CriticConfig)


@dataclass(frozen=True)
class PPOConfig(RootConfig):
    """The whole `ppo_trainer.yaml`; an attribute path is the key path."""

    config_name: ClassVar[str] = "ppo_trainer"

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    env: EnvConfig = field(default_factory=EnvConfig)

    @property
    def use_reference(self) -> bool:
        """Whether a frozen reference policy is needed."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def use_critic(self) -> bool:
        """Whether the estimator needs a value model."""
        return self.algorithm.adv_estimator == "gae"

    def normalized(self) -> PPOConfig:
        """Old global micro-batch sizes become per-rank ones; `trainer.val_out` selects the evaluation split.

        A global size of an update that the number of ranks does not divide stays as it is; `validate_ppo_config`
        refuses it. A pass without update takes any number of rows, so its size is rounded down.
        """
        ranks = self.trainer.world_size
        policy = self.actor_rollout_ref
        actor, ref, rollout, critic = policy.actor, policy.ref, policy.rollout, self.critic
        actor = _per_rank(actor, "ppo_micro_batch_size", ranks)
        ref = _per_rank(ref, "log_prob_micro_batch_size", ranks, exact=False)
        rollout = _per_rank(rollout, "log_prob_micro_batch_size", ranks, exact=False)
        critic = _per_rank(critic, "ppo_micro_batch_size", ranks)
        critic = _per_rank(critic, "forward_micro_batch_size", ranks, exact=False)
        env = self.env
        if self.trainer.val_out:
            env = replace(env, alfworld=replace(env.alfworld, eval_dataset="eval_out_of_distribution"))
        policy = replace(policy, actor=actor, ref=ref, rollout=rollout)
        return replace(self, actor_rollout_ref=policy, critic=critic, env=env)


def _per_rank(section: SectionT, key: str, ranks: int, *, exact: bool = True) -> SectionT:
    """`section` with a set `key` moved to `{key}_per_gpu`, where that is null and (`exact`) the division is exact."""
    old, new = getattr(section, key), getattr(section, f"{key}_per_gpu")
    if old is None or new is not None or (exact and old % ranks):
        return section
    return replace(section, **{key: None, f"{key}_per_gpu": max(1, old // ranks)})
