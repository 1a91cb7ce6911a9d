#!/usr/bin/env bash
# Stage 2 on ALFWorld: credit analyses in, discriminator folder out.
#   bash run_training_alfworld.sh [NAME=value ...] CREDIT.json [CREDIT.json ...] [key=value ...]
# NAME=value are the variables below (of the environment or as arguments); key=value go to the fine-tuning program
# (sft_trainer.yaml), applied last, for example optim.lr=3e-3 trainer.total_epochs=4.
#   MODEL        model to fine-tune, folder or id                       (default: Qwen/Qwen2.5-1.5B-Instruct)
#   OUT_DIR      folder of all output                                   (default: outputs/discriminator_alfworld)
#   MAX_LENGTH   most tokens of a row; observations are shortened to fit          (default: 4096)
#   VAL_SHARE    share of tasks held out                                          (default: 0.1)
#   LABEL_SOURCE single or minimal; empty: what the analyses chose                (default: empty)
#   BALANCE      1 = weight the two classes equally                               (default: 0)
#   THRESHOLD    credit below it counts as redundant                              (default: 0.5)
#   NPROC        processes of the fine-tuning; 1 runs without torchrun            (default: 1)
#   DEVICE       auto, cpu or cuda                                                (default: auto)
#   SEED         of split and order of rows                                       (default: 0)
#   PYTHON       interpreter                              (default: the repository's .venv, else python3)
# Relative paths are relative to the folder the script is called from.
# Writes OUT_DIR/{data/{train,val}.parquet, data/prepare_report.json, sft/, model/, report.json, report.md}.
set -euo pipefail
ENV_NAME=alfworld
source "$(dirname "${BASH_SOURCE[0]}")/training.sh" "$@"
