#!/usr/bin/env bash
# Fine-tuning on whole conversations: Qwen2.5-0.5B-Instruct, every turn of the assistant is trained.
#   bash examples/sft/multiturn/run_qwen_05.sh [NPROC] [SAVE_PATH] [key=value ...]
# NPROC processes (1; under torchrun when more) train one model; checkpoints go to SAVE_PATH (outputs/sft).
# The rows are {train,test}.parquet in $DATA (default ~/data/multiturn) with a column messages: lists of role and content.
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh" "$@"

launch_sft \
  data.train_files="${DATA:-$HOME/data/multiturn}/train.parquet" \
  data.val_files="${DATA:-$HOME/data/multiturn}/test.parquet" \
  data.multiturn.enable=True \
  data.multiturn.messages_key=messages \
  data.micro_batch_size_per_gpu=4 \
  model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \
  use_remove_padding=True \
  trainer.project_name=multiturn-sft \
  trainer.experiment_name=multiturn-sft-qwen-2.5-0.5b-instruct \
  trainer.logger=[console]
