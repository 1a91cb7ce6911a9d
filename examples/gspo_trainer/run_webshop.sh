#!/usr/bin/env bash
# GSPO (sequence-level ratios) on WebShop: Qwen2.5-1.5B-Instruct, two GPUs, 16 goals x 8 episodes a step, 200 steps.
#   bash examples/gspo_trainer/run_webshop.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
  actor_rollout_ref.actor.clip_ratio_low=0.0003 \
  actor_rollout_ref.actor.clip_ratio_high=0.0004 \
  trainer.resume_mode=auto \
  trainer.total_epochs=200 \
  trainer.experiment_name=gspo_qwen2.5_1.5b
