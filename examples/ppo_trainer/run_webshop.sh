#!/usr/bin/env bash
# PPO with a value model on WebShop: Qwen2.5-1.5B-Instruct, two GPUs, 128 goals x 1 episode a step, 150 steps.
#   bash examples/ppo_trainer/run_webshop.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  "${CRITIC_1_5B[@]}" \
  critic.ppo_micro_batch_size_per_gpu=4 \
  trainer.experiment_name=ppo_qwen2.5_1.5b
