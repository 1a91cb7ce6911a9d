# SPDX-License-Identifier: Apache-2.0
"""Batch sizes and token budgets that cannot work; see `verl.trainer.config.validate`."""

from __future__ import annotations

from verl.trainer.config.ppo_sections import PPOConfig
from verl.trainer.config.worker_sections import ActorConfig, CriticConfig, RefConfig, RolloutConfig
from verl.utils.errors import UserError

__all__ = ["check_critic_sizes", "check_micro_batch", "check_mini_batch", "check_policy_sizes"]


def check_policy_sizes(cfg: PPOConfig) -> None:
    """Raise UserError for sizes of actor, reference and rollout that cannot work."""
    ranks = cfg.trainer.world_size
    policy = cfg.actor_rollout_ref
    longest = policy.rollout.max_row_length
    _check_pass("actor_rollout_ref.rollout", policy.rollout, longest)
    if cfg.use_reference:
        _check_pass("actor_rollout_ref.ref", policy.ref, longest)
    _check_update("actor_rollout_ref.actor", policy.actor, ranks, longest)


def check_critic_sizes(cfg: PPOConfig) -> None:
    """Raise UserError for sizes of the section `critic` that cannot work."""
    critic, longest = cfg.critic, cfg.actor_rollout_ref.rollout.max_row_length
    _check_update("critic", critic, cfg.trainer.world_size, longest)
    if critic.use_dynamic_bsz:
        _check_budget("critic.forward_max_token_len_per_gpu", critic.forward_max_token_len_per_gpu, longest)
    else:
        _check_pair(
            "critic.forward_micro_batch_size", critic.forward_micro_batch_size, critic.forward_micro_batch_size_per_gpu
        )


def _check_pass(prefix: str, section: RolloutConfig | RefConfig, row_length: int) -> None:
    """A forward-only pass works with any number of rows; it needs a micro-batch size or a token budget."""
    key = f"{prefix}.log_prob_micro_batch_size"
    if section.log_prob_use_dynamic_bsz:
        _check_budget(f"{prefix}.log_prob_max_token_len_per_gpu", section.log_prob_max_token_len_per_gpu, row_length)
    else:
        _check_pair(key, section.log_prob_micro_batch_size, section.log_prob_micro_batch_size_per_gpu)


def _check_budget(key: str, budget: int, row_length: int) -> None:
    """A row alone must fit into a token budget."""
    if budget < row_length:
        raise UserError(
            f"{key}={budget} is below the {row_length} tokens that one row can have (data.max_prompt_length + "
            f"data.max_response_length); set it to {row_length} or more."
        )


def _check_update(prefix: str, section: ActorConfig | CriticConfig, ranks: int, row_length: int) -> None:
    key, mini = f"{prefix}.ppo_mini_batch_size", section.ppo_mini_batch_size
    check_mini_batch(key, mini, ranks)
    if section.use_dynamic_bsz:
        _check_budget(f"{prefix}.ppo_max_token_len_per_gpu", section.ppo_max_token_len_per_gpu, row_length)
        return
    micro_key, micro = f"{prefix}.ppo_micro_batch_size", section.ppo_micro_batch_size_per_gpu
    _check_pair(micro_key, section.ppo_micro_batch_size, micro)
    if micro is None:
        raise UserError(
            f"{micro_key}={section.ppo_micro_batch_size} does not divide by the {ranks} ranks; set "
            f"{micro_key}_per_gpu to the rows of one rank instead."
        )
    check_micro_batch(key, mini, f"{micro_key}_per_gpu", micro, ranks)


def _check_pair(key: str, old: int | None, per_gpu: int | None) -> None:
    if old is None and per_gpu is None:
        raise UserError(f"{key}_per_gpu is not set; set it to the rows of one forward pass, for example 8.")
    if old is not None and per_gpu is not None:
        raise UserError(f"{key}={old} and {key}_per_gpu={per_gpu} are both set; keep only {key}_per_gpu.")


def check_mini_batch(key: str, mini: int, ranks: int) -> None:
    """Raise UserError unless `ranks` can share `mini` rows equally."""
    if mini % ranks == 0:
        return
    below, above = mini // ranks * ranks, (mini // ranks + 1) * ranks
    choices = f"{above}" if below == 0 else f"{below} or {above}"
    raise UserError(f"{key}={mini} rows cannot be shared equally by {ranks} ranks; set {key} to {choices}.")


def check_micro_batch(mini_key: str, mini: int, micro_key: str, micro: int, ranks: int) -> None:
    """Raise UserError unless `micro` rows divide one rank's share of `mini`."""
    rows = mini // ranks
    if rows % micro == 0:
        return
    divisor = max(size for size in range(1, min(micro, rows) + 1) if rows % size == 0)
    larger = -(-rows // micro) * micro * ranks
    raise UserError(
        f"{micro_key}={micro} does not divide the {rows} rows that each of {ranks} ranks gets of {mini_key}={mini}; "
        f"set {micro_key}={divisor} or {mini_key}={larger}."
    )
