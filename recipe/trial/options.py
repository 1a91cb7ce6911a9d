# SPDX-License-Identifier: Apache-2.0
"""Typed form of the `trial` config group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl.trainer.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from verl.trainer.config.schema import PPOConfig

__all__ = ["Allocation", "TrialConfig"]

Allocation = Literal["relative", "uniform", "permuted"]


@dataclass(frozen=True)
class TrialConfig:
    """Hindsight distillation on top of GRPO; every field is a key of the group of the same name.

    enable: False gives plain GRPO, bit for bit.
    beta: weight of the dense term; 0 measures and logs the gaps and leaves the update GRPO's.
    c: a token's gap is clipped to [-c, c].
    clamp_by_grpo: scale the batch's dense term down until its mean absolute value is at most the GRPO term's.
    allocation: `relative`: a turn weighs by its share of its trajectory's gaps; `uniform`: all turns alike;
        `permuted`: the relative multipliers shuffled over the turns of the trajectory.
    view: `outcome`: hindsight sees what the turn led to; `identical`: it sees what the policy saw, so all gaps are 0.
    max_outcome_length: tokens of an outcome, in addition to `data.max_prompt_length`; longer ones lose their end.
    mask_special_tokens: leave the tokenizer's special tokens out.
    seed: of the permutation; null: `env.seed`.
    """

    enable: bool = True
    beta: NonNegativeFloat = 0.1
    c: PositiveFloat = 1.0
    clamp_by_grpo: bool = False
    allocation: Allocation = "relative"
    view: Literal["outcome", "identical"] = "outcome"
    max_outcome_length: PositiveInt = 512
    mask_special_tokens: bool = False
    seed: NonNegativeInt | None = None

    @classmethod
    def of(cls, config: PPOConfig) -> TrialConfig:
        """The group of a run's config."""
        options: TrialConfig = config.extra["trial"]
        return options

    def validate(self, config: PPOConfig) -> None:
        """Refuse what cannot work; the remaining ranges and choices are checked when the config is built.

        Raises:
            UserError: names the key and what to set instead.
        """
        for name, value in (("beta", self.beta), ("c", self.c)):
            if not math.isfinite(value):
                raise UserError(f"trial.{name}={value} must be finite; beta=0.1 and c=1.0 are the defaults.")
        rollout = config.actor_rollout_ref.rollout
        needed = rollout.max_row_length + self.max_outcome_length
        budget = rollout.log_prob_max_token_len_per_gpu
        if self.view == "outcome" and rollout.log_prob_use_dynamic_bsz and budget < needed:
            raise UserError(
                f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={budget} is below the {needed} tokens that "
                "one row can have with its outcome (data.max_prompt_length + data.max_response_length + "
                f"trial.max_outcome_length); set it to {needed} or more, or trial.max_outcome_length lower."
            )
