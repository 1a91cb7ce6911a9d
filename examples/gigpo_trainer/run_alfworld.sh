#!/usr/bin/env bash
# GiGPO on ALFWorld: Qwen2.5-1.5B-Instruct, two GPUs, 16 games x 8 episodes a step, 150 steps.
#   bash examples/gigpo_trainer/run_alfworld.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The games are looked for in $ALFWORLD_DATA; env.alfworld.source=generated makes some instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${ALFWORLD_1_5B[@]}" \
  "${GIGPO[@]}" \
  algorithm.gigpo.mode=mean_std_norm \
  trainer.experiment_name=gigpo_qwen2.5_1.5b
