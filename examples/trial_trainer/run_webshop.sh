#!/usr/bin/env bash
# TRIAL on WebShop: Qwen3-1.7B with thinking switched off, two GPUs, 16 goals x 8 episodes a step, 150 steps.
#   bash examples/trial_trainer/run_webshop.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
# Controls: trial.allocation=uniform, trial.allocation=permuted, trial.view=identical (= GRPO).
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch recipe.trial.main \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  actor_rollout_ref.model.path=Qwen/Qwen3-1.7B \
  +data.apply_chat_template_kwargs.enable_thinking=False \
  trial.beta=0.1 \
  trial.c=1.0 \
  trial.allocation=relative \
  trial.max_outcome_length=1024 \
  trainer.experiment_name=trial_qwen3_1.7b
