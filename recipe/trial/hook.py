# SPDX-License-Identifier: Apache-2.0
"""The trainer hook of TRIAL: score every response once more knowing the outcome, add the difference as supervision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.trial.allocation import add_term, allocate, clamp_term, dense_term, token_gaps
from recipe.trial.hindsight import HindsightPrompts
from recipe.trial.metrics import gap_metrics, term_metrics, weight_metrics
from recipe.trial.options import TrialConfig
from recipe.trial.outcome import outcome_views
from verl.protocol import DataProto
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.group_stats import factorize
from verl.trainer.ppo.recipes import TrainerContext, TrainerHook
from verl.trainer.ppo.rollout_correction import KEPT
from verl.trainer.ppo.worker_groups import ACTOR_ROLLOUT, score_rows

if TYPE_CHECKING:
    from verl.trainer.config.schema import PPOConfig

__all__ = ["HINDSIGHT_COLUMN", "WEIGHT_COLUMN", "TrialHook"]

HINDSIGHT_COLUMN = "hindsight_log_probs"
WEIGHT_COLUMN = "turn_weights"
# Names the generator of the permuted allocation, so that it shares no draw with other generators of a step.
_PERMUTATION_STREAM = 2


class TrialHook(TrainerHook):
    """Adds the columns `hindsight_log_probs` (B, R) and `turn_weights` (B,), and the dense term to `advantages`.

    The hindsight pass runs before the update, by the policy that wrote the responses. With view=identical it would
    repeat the ordinary one, whose result is taken instead. Validation calls no hook.
    """

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.options = TrialConfig.of(config)
        self._prompts: HindsightPrompts | None = None

    @classmethod
    def is_enabled(cls, config: PPOConfig) -> bool:
        return TrialConfig.of(config).enable

    @classmethod
    def check_config(cls, config: PPOConfig) -> None:
        TrialConfig.of(config).validate(config)

    def after_log_prob(self, ctx: TrainerContext, batch: DataProto) -> None:
        tensors = tensors_of(batch)
        if self.options.view == "identical":
            tensors[HINDSIGHT_COLUMN] = tensors["old_log_probs"].clone()
            return
        with ctx.timer("hindsight_log_prob"):
            tensors[HINDSIGHT_COLUMN] = self._hindsight_log_prob(ctx, batch)

    def _hindsight_log_prob(self, ctx: TrainerContext, batch: DataProto) -> Tensor:
        """(B, R) log-probabilities of the responses given the prompts with outcomes."""
        if self._prompts is None:
            options = self.config.data.apply_chat_template_kwargs
            self._prompts = HindsightPrompts(ctx.tokenizer, self.options.max_outcome_length, options)
        views = {episode.traj_uid: outcome_views(episode) for episode in ctx.episodes}
        columns = batch.non_tensor_batch
        outcomes = [views[uid][turn] for uid, turn in zip(columns["traj_uid"], columns["step_index"], strict=True)]
        rows, counts = self._prompts.build(batch, outcomes)
        ctx.metrics.update({f"trial/{name}": float(count) for name, count in counts.items()})
        policy: Any = ctx.worker_groups[ACTOR_ROLLOUT]

        def log_probs_only(shares: DataProto) -> DataProto:
            shares.meta_info["calculate_entropy"] = False
            result: DataProto = policy.compute_log_prob(shares)
            return result

        scored = score_rows(
            log_probs_only,
            rows,
            world_size=policy.world_size,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        log_probs: Tensor = tensors_of(scored)["old_log_probs"]
        return log_probs

    def after_advantage(self, ctx: TrainerContext, batch: DataProto) -> None:
        tensors, columns, options = tensors_of(batch), batch.non_tensor_batch, self.options
        mask, advantages = _learned(tensors), tensors["advantages"]
        gaps = token_gaps(tensors[HINDSIGHT_COLUMN], tensors["old_log_probs"], self._taught(ctx, tensors))
        clipped = gaps.gap.clamp(-options.c, options.c)
        # A turn counts once in its trajectory, and copies of its row get its multiplier.
        turn = factorize(list(zip(columns["traj_uid"], columns["step_index"], strict=True)))
        once = torch.from_numpy(np.unique(turn, return_index=True)[1])
        num_tokens, trajectory = gaps.num_tokens[once], torch.from_numpy(factorize(columns["traj_uid"]))[once]
        seed = self.config.env.seed if options.seed is None else options.seed
        rng = np.random.default_rng([seed, ctx.global_step, _PERMUTATION_STREAM])
        of_turns = allocate(options.allocation, clipped[once], num_tokens, trajectory, rng)
        weights = of_turns[torch.from_numpy(turn)]
        term = dense_term(clipped, weights, options.beta)
        if options.clamp_by_grpo:
            term = clamp_term(term, advantages, mask)
        tensors["advantages"] = add_term(advantages, term)
        tensors[WEIGHT_COLUMN] = weights.float()
        ctx.metrics.update(gap_metrics(gaps, torch.from_numpy(columns["episode_success"].astype(bool))))
        ctx.metrics.update(weight_metrics(of_turns, num_tokens, trajectory))
        ctx.metrics.update(term_metrics(term, advantages, mask))

    def _taught(self, ctx: TrainerContext, tensors: TensorDict) -> Tensor:
        """(B, R) bool: tokens that the update learns from, without special ones if asked."""
        mask = _learned(tensors)
        if not self.options.mask_special_tokens:
            return mask
        return mask & ~torch.isin(tensors["responses"], torch.tensor(ctx.tokenizer.all_special_ids))


def _learned(tensors: TensorDict) -> Tensor:
    """(B, R) bool: response tokens, without those that `algorithm.rollout_correction.rollout_rs` rejects."""
    mask: Tensor = tensors["response_mask"].bool()
    return mask & tensors[KEPT] if KEPT in tensors else mask
