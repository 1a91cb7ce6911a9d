#!/usr/bin/env bash
# Fine-tuning on questions and answers with LoRA: Qwen2.5-0.5B-Instruct, rank 32, one epoch.
#   bash examples/sft/gsm8k/run_qwen_05_peft.sh [NPROC] [SAVE_PATH] [key=value ...]
# NPROC processes (1; under torchrun when more) train one model; checkpoints go to SAVE_PATH (outputs/sft).
# The rows come from GSM8K as {train,test}.parquet in $DATA (default ~/data/gsm8k) with a column extra_info that holds
# question and answer.
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh" "$@"

launch_sft \
  data.train_files="${DATA:-$HOME/data/gsm8k}/train.parquet" \
  data.val_files="${DATA:-$HOME/data/gsm8k}/test.parquet" \
  data.prompt_key=extra_info \
  data.response_key=extra_info \
  data.prompt_dict_keys=[question] \
  data.response_dict_keys=[answer] \
  data.micro_batch_size_per_gpu=4 \
  model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \
  optim.lr=1e-4 \
  trainer.project_name=gsm8k-sft \
  model.lora_rank=32 \
  model.lora_alpha=16 \
  model.target_modules=all-linear \
  trainer.experiment_name=gsm8k-sft-qwen-2.5-0.5b-instruct \
  trainer.logger=[console] \
  trainer.total_epochs=1
