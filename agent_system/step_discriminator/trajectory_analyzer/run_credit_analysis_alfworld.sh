#!/usr/bin/env bash
# Stage 1 on ALFWorld: collect expert trajectories (unless some are given), label their steps by replay, report.
#   bash run_credit_analysis_alfworld.sh [NAME=value ...]
# Each NAME is a variable of the environment or an argument:
#   TRAJECTORIES  files to analyse, separated by spaces; empty: collect some first          (default: empty)
#   DATA_DIR      ALFWorld data folder; empty: $ALFWORLD_DATA, then ~/.cache/alfworld       (default: empty)
#   GENERATE      make this many games in DATA_DIR first; empty: use what is there          (default: empty)
#   SPLIT         train, valid_seen or valid_unseen                                         (default: train)
#   NUM           episodes to collect                                                       (default: 200)
#   DETOUR_RATE   useless steps mixed into the expert's play                                (default: 0.3)
#   ERROR_RATE    commands mixed in that do nothing                                         (default: 0)
#   MAX_STEPS     step limit of an episode                                                  (default: 50)
#   SEED          seed of the expert and of the order of games                              (default: 0)
#   WORKERS       Ray workers; 1: none, 0: one per core                                     (default: 1)
#   OUT_DIR       folder of all output                                                      (default: outputs/credit_analysis_alfworld)
#   PYTHON        interpreter                                                (default: the repository's .venv, else python3)
# Relative paths are relative to the folder the script is called from.
# Writes trajectories.jsonl (when collecting), credit_analysis.json, credit_summary.csv, credit_report.md.
set -euo pipefail
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
fi
for argument in "$@"; do
  case "$argument" in
    TRAJECTORIES=* | DATA_DIR=* | GENERATE=* | SPLIT=* | NUM=* | DETOUR_RATE=* | ERROR_RATE=* | MAX_STEPS=* | SEED=* | WORKERS=* | OUT_DIR=* | PYTHON=*)
      printf -v "${argument%%=*}" '%s' "${argument#*=}"
      ;;
    *)
      echo "error: unknown argument '$argument'; see -h for the names." >&2
      exit 2
      ;;
  esac
done

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
  if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON=python3; fi
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
PACKAGE=agent_system.step_discriminator.trajectory_analyzer
OUT_DIR="${OUT_DIR:-outputs/credit_analysis_alfworld}"
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
  "$PYTHON" -m "$PACKAGE.collect" \
    ${DATA[@]+"${DATA[@]}"} \
    ${MAKE[@]+"${MAKE[@]}"} \
    --split "${SPLIT:-train}" \
    --num "${NUM:-200}" \
    --detour-rate "${DETOUR_RATE:-0.3}" \
    --error-rate "${ERROR_RATE:-0}" \
    --max-steps "${MAX_STEPS:-50}" \
    --seed "${SEED:-0}" \
    --workers "$WORKERS" \
    --out "${FILES[0]}"
fi

# Status 1: the analysis is complete, but some lines or games were unreadable. It is reported all the same.
STATUS=0
"$PYTHON" -m "$PACKAGE.analyze" "${FILES[@]}" \
  ${DATA[@]+"${DATA[@]}"} \
  --workers "$WORKERS" \
  --out-dir "$OUT_DIR" || STATUS=$?
if [ "$STATUS" -gt 1 ]; then exit "$STATUS"; fi
"$PYTHON" -m "$PACKAGE.report" "$OUT_DIR/credit_analysis.json"
exit "$STATUS"
