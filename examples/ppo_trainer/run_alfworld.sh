#!/usr/bin/env bash
# PPO with a value model on ALFWorld: Qwen2.5-1.5B-Instruct, two GPUs, 128 games x 1 episode a step, 150 steps.
#   bash examples/ppo_trainer/run_alfworld.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The games are looked for in $ALFWORLD_DATA; env.alfworld.source=generated makes some instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${ALFWORLD_1_5B[@]}" \
  "${CRITIC_1_5B[@]}" \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  critic.ppo_micro_batch_size_per_gpu=16 \
  trainer.experiment_name=ppo_qwen2.5_1.5b
