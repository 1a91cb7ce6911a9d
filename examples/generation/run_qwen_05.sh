#!/usr/bin/env bash
# Responses to a parquet file of prompts: Qwen2.5-0.5B-Instruct, one GPU, one sample a row.
#   bash examples/generation/run_qwen_05.sh [ENGINE] [key=value ...]
# ENGINE is the rollout engine (vllm by default, hf runs anywhere); overrides are applied last.
# Prompts are chat messages (or texts) in the column prompt of $DATA/test.parquet (default ~/data/gsm8k); the output has
# one more column, responses.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch verl.trainer.main_generation \
  data.path="${DATA:-$HOME/data/gsm8k}/test.parquet" \
  data.output_path=outputs/generation/responses.parquet \
  data.prompt_key=prompt \
  data.n_samples=1 \
  model.path=Qwen/Qwen2.5-0.5B-Instruct \
  rollout.name="$ENGINE" \
  rollout.temperature=1.0 \
  rollout.top_k=50 \
  rollout.top_p=0.7 \
  rollout.prompt_length=2048 \
  rollout.response_length=1024 \
  rollout.tensor_model_parallel_size=1 \
  rollout.gpu_memory_utilization=0.8 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=1
