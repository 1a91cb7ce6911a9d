#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks on a CUDA device, under eight minutes. Besides the package they need torch, transformers, tensordict and pytest
# (peft for the adapters, flash-attn for its attention; those tests are left out without them); no Ray.
# The discriminator's memory test also needs hydra and the environments' packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python}
targets=(tests/gpu)
if "$python" -c "import hydra, pandas" 2>/dev/null; then
  targets+=(tests/recipe/traj_evolve/test_memory_gpu.py)
else
  echo "hydra or pandas is missing: tests/recipe/traj_evolve/test_memory_gpu.py is left out"
fi
exec timeout 480 "$python" -m pytest -m gpu -p no:cacheprovider "${targets[@]}" "$@"
