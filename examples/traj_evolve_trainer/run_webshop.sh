#!/usr/bin/env bash
# Stage 3 on WebShop: GRPO with trajectory evolution, Qwen2.5-1.5B-Instruct, two GPUs, 150 steps.
#   DISCRIMINATOR=/path/to/stage2 bash examples/traj_evolve_trainer/run_webshop.sh [ENGINE] [key=value ...]
# DISCRIMINATOR is the folder that stage 2 wrote (run_training_webshop.sh). Without it the run needs
# traj_evolve.credit_source=replay (exact credit by ablation in the environment) or =none.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch recipe.traj_evolve.main \
  "${AGENT_GRPO[@]}" \
  "${WEBSHOP_1_5B[@]}" \
  traj_evolve.enable=True \
  traj_evolve.discriminator_model_path="${DISCRIMINATOR:-null}" \
  traj_evolve.alpha=1.0 \
  traj_evolve.evolve_freq=5 \
  traj_evolve.discriminator_lr=1e-5 \
  traj_evolve.discriminator_epochs=1 \
  traj_evolve.step_credit_value=0.5 \
  trainer.experiment_name=traj_evolve_qwen2.5_1.5b
