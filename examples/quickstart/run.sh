#!/usr/bin/env bash
# The whole pipeline on generated tasks with a tiny model, on a laptop CPU, in under 15 minutes.
#   bash examples/quickstart/run.sh                 ALFWorld games; results in outputs/quickstart
#   bash examples/quickstart/run.sh --env webshop   a shop; results in outputs/quickstart-webshop
#   bash examples/quickstart/run.sh --smoke         every phase, much smaller, under 3 minutes (outputs/quickstart-smoke)
#   bash examples/quickstart/run.sh --out DIR --seed N --fresh
# A run that was interrupted continues with the phase that was not finished; --fresh starts over.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,7p' "${BASH_SOURCE[0]}" | cut -c3-
  exit 0
fi
bash "$root/requirements/install_cpu.sh"
cd "$root"
export PYTHON="$root/.venv/bin/python" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$PYTHON" -m examples.quickstart.pipeline "$@"
