#!/usr/bin/env bash
# HGPO on ALFWorld: Qwen2.5-1.5B-Instruct, two GPUs, 16 games x 8 episodes a step, 160 steps.
#   bash recipe/hgpo/run_alfworld.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The games are looked for in $ALFWORLD_DATA; env.alfworld.source=generated makes some instead.
# Evaluation of a finished run: trainer.val_only=True, and trainer.val_out=True for unseen rooms.
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${ALFWORLD_1_5B[@]}" \
  "${HGPO[@]}" \
  algorithm.hgpo.mode=mean_std_norm \
  data.max_prompt_length=4096 \
  data.truncation=left \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
  env.history_length=2 \
  trainer.project_name=qwen2.5_1.5b_alfworld_train \
  trainer.experiment_name=k2_hgpo_length_alpha1.0_baseGroup_False \
  trainer.save_freq=40 \
  trainer.total_epochs=160 \
  trainer.val_before_train=False
