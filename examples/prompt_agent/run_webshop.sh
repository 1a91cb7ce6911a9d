#!/usr/bin/env bash
# A model behind an OpenAI-compatible chat endpoint plays WebShop; the file is what credit analysis reads.
#   bash examples/prompt_agent/run_webshop.sh [MODEL] [--option value ...] [env.key=value ...]
# MODEL is Qwen/Qwen2.5-7B-Instruct where it is left out.
# The endpoint is $OPENAI_BASE_URL (default http://127.0.0.1:8000/v1, where `vllm serve MODEL` listens), the key
# $OPENAI_API_KEY. Options are those of python -m examples.prompt_agent.run; the ones given here win.
# The product files are looked for in $WEBSHOP_DATA (docs/webshop.md); env.webshop.source=generated makes a shop instead.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"

launch examples.prompt_agent.run \
  --env webshop \
  --base-url "${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}" \
  --model "${WORDS[0]:-Qwen/Qwen2.5-7B-Instruct}" \
  --split train \
  --episodes 200 \
  --group-size 1 \
  --concurrency 16 \
  --temperature 0.4 \
  --max-tokens 512 \
  --out outputs/prompt_agent/webshop.jsonl
