#!/usr/bin/env bash
# GRPO on WebShop: Qwen2.5-1.5B-Instruct, two GPUs, 16 goals x 8 episodes a step, 150 steps.
#   bash examples/grpo_trainer/run_webshop.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  trainer.experiment_name=grpo_qwen2.5_1.5b
