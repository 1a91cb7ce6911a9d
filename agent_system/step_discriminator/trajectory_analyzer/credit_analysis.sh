# Stage 1, sourced by run_credit_analysis_<env>.sh with the script's arguments; ENV_NAME says which environment. The
# variables are described in the scripts.
set -euo pipefail
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 0
fi
for argument in "$@"; do
  case "$argument" in
    TRAJECTORIES=* | DATA_DIR=* | GENERATE=* | SPLIT=* | NUM=* | DETOUR_RATE=* | ERROR_RATE=* | MAX_STEPS=* | \
      SUCCESS_THRESHOLD=* | MODE=* | LABEL_SOURCE=* | SEED=* | WORKERS=* | OUT_DIR=* | PYTHON=*)
      printf -v "${argument%%=*}" '%s' "${argument#*=}"
      ;;
    *)
      echo "error: unknown argument '$argument'; see -h for the names." >&2
      exit 2
      ;;
  esac
done
# Before anything is collected, in the names that were given.
case "${MODE:-single}/${LABEL_SOURCE:-single}" in
  single/single | minimal/single | minimal/minimal) ;;
  single/minimal)
    echo "error: LABEL_SOURCE=minimal needs MODE=minimal." >&2
    exit 2
    ;;
  *)
    echo "error: MODE='${MODE:-single}' and LABEL_SOURCE='${LABEL_SOURCE:-single}' must each be single or minimal." >&2
    exit 2
    ;;
esac
case "${NUM:-200}" in
  *[!0-9]* | 0*)
    echo "error: NUM='$NUM' is no number of episodes; set it to 1 or more." >&2
    exit 2
    ;;
esac

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
  if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON=python3; fi
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
PACKAGE=agent_system.step_discriminator.trajectory_analyzer
OUT_DIR="${OUT_DIR:-outputs/credit_analysis_$ENV_NAME}"
WORKERS="${WORKERS:-1}"
DATA=()
if [ -n "${DATA_DIR:-}" ]; then DATA=(--data-dir "$DATA_DIR"); fi

FILES=()
if [ -n "${TRAJECTORIES:-}" ]; then
  read -r -a FILES <<<"$TRAJECTORIES"
else
  FILES=("$OUT_DIR/trajectories.jsonl")
  MAKE=()
  if [ -n "${GENERATE:-}" ]; then MAKE=(--generate "$GENERATE"); fi
  LIMIT=()
  if [ -n "${MAX_STEPS:-}" ]; then LIMIT=(--max-steps "$MAX_STEPS"); fi
  "$PYTHON" -m "$PACKAGE.collect" \
    --env "$ENV_NAME" \
    ${DATA[@]+"${DATA[@]}"} \
    ${MAKE[@]+"${MAKE[@]}"} \
    ${LIMIT[@]+"${LIMIT[@]}"} \
    --split "${SPLIT:-train}" \
    --num "${NUM:-200}" \
    --detour-rate "${DETOUR_RATE:-0.3}" \
    --error-rate "${ERROR_RATE:-0}" \
    --seed "${SEED:-0}" \
    --workers "$WORKERS" \
    --out "${FILES[0]}"
fi

# Status 1: the analysis is complete, but some lines or tasks were unreadable. It is reported all the same.
STATUS=0
"$PYTHON" -m "$PACKAGE.analyze" "${FILES[@]}" \
  ${DATA[@]+"${DATA[@]}"} \
  --mode "${MODE:-single}" \
  --label-source "${LABEL_SOURCE:-single}" \
  --success-threshold "${SUCCESS_THRESHOLD:-1.0}" \
  --workers "$WORKERS" \
  --out-dir "$OUT_DIR" || STATUS=$?
if [ "$STATUS" -gt 1 ]; then exit "$STATUS"; fi
"$PYTHON" -m "$PACKAGE.report" "$OUT_DIR/credit_analysis.json"
exit "$STATUS"
