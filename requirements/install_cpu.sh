#!/usr/bin/env bash
# Makes the project's virtual environment from the CPU lock file. Does nothing when it is already up to date.
#   bash requirements/install_cpu.sh            the environment is .venv in the repository
#   VENV=/path bash requirements/install_cpu.sh somewhere else
# LOCK and PIP_FLAGS are for scripts that make another environment with this one (install_vllm_cpu.sh).
set -euo pipefail
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,4p' "${BASH_SOURCE[0]}" | cut -c3-
  exit 0
fi
if [ "$#" -gt 0 ]; then
  echo "error: unknown argument '$1'; this script takes none (VENV=/path in front of it names another place)" >&2
  exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
lock="${LOCK:-$root/requirements/cpu.lock.txt}"
stamp="$venv/.trajevolve-installed"
if [ -L "$venv" ]; then
  echo "error: $venv is a link; installing would change the environment behind it. Remove the link, or set VENV=/path" >&2
  exit 2
fi

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3 python3.12; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 13)))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "error: no Python 3.11 or 3.12 found (textworld does not run on 3.13, the locked numpy not on 3.10); install one or set PYTHON=/path/to/python" >&2
  return 1
}

python="$(find_python)"
wanted="$(cat "$lock" "$root/setup.py" "$root/requirements.txt" | sha256sum | cut -d' ' -f1) $root"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
  exit 0
fi

log="$root/outputs/install-$(basename "$venv" | tr -d .).log"
mkdir -p "$root/outputs"
# Two installs into one folder at the same time would break both.
exec 9>"$venv.lock"
flock 9
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi
echo "setting up $venv (log: $log); the first time takes a few minutes" >&2
rm -f "$stamp"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
if ! {
  # torch first: packages that only ask for "torch" must find this one and not fetch another build.
  "$venv/bin/python" -m pip install --disable-pip-version-check "$(grep '^torch==' "$lock")" &&
  "$venv/bin/python" -m pip install --disable-pip-version-check ${PIP_FLAGS:-} -r "$lock" &&
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps -e "$root"
} >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  echo "error: the installation failed; the whole log is $log" >&2
  exit 1
fi
echo "$wanted" >"$stamp"
