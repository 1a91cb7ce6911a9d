#!/usr/bin/env bash
# HGPO on WebShop: Qwen2.5-1.5B-Instruct, two GPUs, 16 goals x 8 episodes a step, 160 steps.
#   bash recipe/hgpo/run_webshop.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
# Evaluation of a finished run: trainer.val_only=True.
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  "${HGPO[@]}" \
  algorithm.hgpo.mode=mean_norm \
  data.truncation=left \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
  env.history_length=2 \
  env.max_steps=30 \
  trainer.project_name=qwen2.5_1.5b_webshop_train \
  trainer.experiment_name=k2_hgpo_length_step30_alpha1.0_baseGroup_False \
  trainer.save_freq=40 \
  trainer.total_epochs=160 \
  trainer.val_before_train=False
