# SPDX-License-Identifier: Apache-2.0
"""Numbers of the policy update, under the names that recipes and outside code import.

Everything is a pure function of tensors and lives by topic in :mod:`group_stats`, :mod:`advantages`, :mod:`losses`,
:mod:`kl` and :mod:`pf_ppo`; importing this module registers the estimators and losses of the core by name
(:mod:`verl.trainer.ppo.registry`).
"""

from __future__ import annotations

from verl.trainer.ppo.advantages import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    normalized_scores,
    to_tokens,
)
from verl.trainer.ppo.group_stats import factorize, group_stats
from verl.trainer.ppo.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from verl.trainer.ppo.losses import (
    LOSS_AGG_MODES,
    agg_loss,
    compute_entropy_loss,
    compute_policy_loss,
    compute_policy_loss_gspo,
    compute_policy_loss_vanilla,
    compute_value_loss,
    compute_value_loss_tokens,
)
from verl.trainer.ppo.pf_ppo import compute_pf_ppo_reweight_data
from verl.trainer.ppo.registry import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    AdvantageResult,
    PolicyLoss,
    PolicyLossOutput,
    ValueLossOutput,
    get_adv_estimator,
    get_policy_loss,
    register_adv_est,
    register_policy_loss,
)
from verl.utils.torch_functional import masked_sum

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "KL_KINDS",
    "LOSS_AGG_MODES",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "AdvantageResult",
    "FixedKLController",
    "PolicyLoss",
    "PolicyLossOutput",
    "ValueLossOutput",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_gspo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "compute_value_loss_tokens",
    "factorize",
    "get_adv_estimator",
    "get_kl_controller",
    "get_policy_loss",
    "group_stats",
    "kl_penalty",
    "masked_sum",
    "normalized_scores",
    "register_adv_est",
    "register_policy_loss",
    "to_tokens",
]
