#!/usr/bin/env bash
# GiGPO on WebShop with Qwen3-1.7B, thinking switched off: two GPUs, 16 goals x 8 episodes a step, no KL, 150 steps.
#   bash examples/gigpo_trainer/run_webshop_qwen3.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  "${GIGPO[@]}" \
  algorithm.gigpo.mode=mean_norm \
  actor_rollout_ref.model.path=Qwen/Qwen3-1.7B \
  +data.apply_chat_template_kwargs.enable_thinking=False \
  actor_rollout_ref.actor.use_kl_loss=False \
  trainer.experiment_name=gigpo_qwen3_1.7b_no_kl
