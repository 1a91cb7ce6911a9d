# SPDX-License-Identifier: Apache-2.0
"""Keys that old scripts may set and that no part of this version reads."""

from __future__ import annotations

from operator import attrgetter

from verl.trainer.config.ppo_sections import PPOConfig
from verl.trainer.config.sft_sections import SFTConfig

__all__ = ["ignored_keys"]

# Keys that only another engine or another role reads are not listed: their section's name says so.
_READ_BY_NOBODY = (
    "data.tokenizer",
    "data.reward_fn_key",
    "data.return_raw_input_ids",
    "data.return_full_prompt",
    "data.video_key",
    "actor_rollout_ref.actor.shuffle",
    "actor_rollout_ref.ref.strategy",
    "actor_rollout_ref.rollout.chat_scheduler",
    "actor_rollout_ref.rollout.use_fire_sampling",
    "actor_rollout_ref.rollout.multi_turn.max_turns",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "reward_model.sandbox_fusion.url",
    "algorithm.hgpo.weight_type",
    "trainer.validation_data_dir",
    "trainer.del_local_ckpt_after_load",
    "trainer.log_eval_steps",
)


_READ_BY_NOBODY_IN_SFT = ("data.micro_batch_size",)


def ignored_keys(cfg: PPOConfig | SFTConfig) -> tuple[str, ...]:
    """The keys that `cfg` sets to something else than their default although nothing reads them."""
    keys, defaults = (
        (_READ_BY_NOBODY_IN_SFT, SFTConfig()) if isinstance(cfg, SFTConfig) else (_READ_BY_NOBODY, PPOConfig())
    )
    return tuple(key for key in keys if attrgetter(key)(cfg) != attrgetter(key)(defaults))
