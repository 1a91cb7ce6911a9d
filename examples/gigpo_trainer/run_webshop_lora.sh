#!/usr/bin/env bash
# GiGPO on WebShop with LoRA: Qwen2.5-7B-Instruct, rank 64, two GPUs, no KL, 150 steps.
#   bash examples/gigpo_trainer/run_webshop_lora.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_ppo \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  "${GIGPO[@]}" \
  "${LORA_7B[@]}" \
  algorithm.gigpo.mode=mean_norm \
  trainer.experiment_name=gigpo_qwen2.5_7b_no_kl_lora
