#!/usr/bin/env bash
# Stage 1 on WebShop: collect expert trajectories (unless some are given), label their steps by replay, report.
#   bash run_credit_analysis_webshop.sh [NAME=value ...]
# Each NAME is a variable of the environment or an argument:
#   TRAJECTORIES  files to analyse, separated by spaces; empty: collect some first          (default: empty)
#   DATA_DIR      folder of the shop's files; empty: $WEBSHOP_DATA                          (default: empty)
#   GENERATE      make a shop with this many goals in DATA_DIR first; empty: use what is there (default: empty)
#   SPLIT         train or val; no product is in both                                       (default: train)
#   NUM           episodes to collect                                                       (default: 200)
#   DETOUR_RATE   useless steps mixed into the expert's play                                (default: 0.3)
#   ERROR_RATE    actions mixed in that do nothing                                          (default: 0)
#   MAX_STEPS     step limit of an episode                                                  (default: 15)
#   SUCCESS_THRESHOLD  score of a purchase from which on the episode is a success; below 1, a step is
#                 redundant when the final score does not fall without it                   (default: 1)
#   MODE          single: delete every step alone; minimal: also look for the shortest success (default: single)
#   LABEL_SOURCE  which of the two is the label: single or minimal                          (default: single)
#   SEED          seed of the expert and of the order of goals                              (default: 0)
#   WORKERS       Ray workers; 1: none, 0: one per core                                     (default: 1)
#   OUT_DIR       folder of all output                                                      (default: outputs/credit_analysis_webshop)
#   PYTHON        interpreter                                                (default: the repository's .venv, else python3)
# Relative paths are relative to the folder the script is called from.
# Writes trajectories.jsonl (when collecting), credit_analysis.json, credit_summary.csv, credit_report.md,
# credit_lengths.png. An interrupted analysis continues with TRAJECTORIES=OUT_DIR/trajectories.jsonl and the same OUT_DIR.
set -euo pipefail
ENV_NAME=webshop
source "$(dirname "${BASH_SOURCE[0]}")/credit_analysis.sh" "$@"
