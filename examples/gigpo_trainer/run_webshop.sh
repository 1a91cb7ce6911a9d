#!/usr/bin/env bash
# GiGPO on WebShop: Qwen2.5-1.5B-Instruct, two GPUs, 6 goals x 8 episodes a step, 150 steps.
#   bash examples/gigpo_trainer/run_webshop.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  "${GIGPO[@]}" \
  algorithm.gigpo.mode=mean_norm \
  data.train_batch_size=6 \
  data.val_batch_size=6 \
  data.max_prompt_length=2048 \
  data.max_response_length=256 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
  trainer.experiment_name=gigpo_qwen2.5_1.5b
