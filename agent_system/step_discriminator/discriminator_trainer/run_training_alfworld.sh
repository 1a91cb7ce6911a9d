#!/usr/bin/env bash
# Stage 2 on ALFWorld: credit analyses in, discriminator folder out.
#   bash run_training_alfworld.sh [NAME=value ...] CREDIT.json [CREDIT.json ...] [key=value ...]
# NAME=value are the variables below (of the environment or as arguments); key=value go to the fine-tuning program
# (sft_trainer.yaml), applied last, for example optim.lr=3e-3 trainer.total_epochs=4.
#   MODEL        model to fine-tune, folder or id                       (default: Qwen/Qwen2.5-1.5B-Instruct)
#   OUT_DIR      folder of all output                                   (default: outputs/discriminator_alfworld)
#   MAX_LENGTH   most tokens of a row; observations are shortened to fit          (default: 4096)
#   VAL_SHARE    share of tasks held out                                          (default: 0.1)
#   BALANCE      1 = weight the two classes equally                               (default: 0)
#   THRESHOLD    credit below it counts as redundant                              (default: 0.5)
#   NPROC        processes of the fine-tuning; 1 runs without torchrun            (default: 1)
#   DEVICE       auto, cpu or cuda                                                (default: auto)
#   SEED         of split and order of rows                                       (default: 0)
#   PYTHON       interpreter                              (default: the repository's .venv, else python3)
# Relative paths are relative to the folder the script is called from.
# Writes OUT_DIR/{data/{train,val}.parquet, data/prepare_report.json, sft/, model/, report.json, report.md}.
set -euo pipefail
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
fi
CREDIT=()
OVERRIDES=()
for argument in "$@"; do
  case "$argument" in
    MODEL=* | OUT_DIR=* | MAX_LENGTH=* | VAL_SHARE=* | BALANCE=* | THRESHOLD=* | NPROC=* | DEVICE=* | SEED=* | PYTHON=*)
      printf -v "${argument%%=*}" '%s' "${argument#*=}"
      ;;
    *=* | "~"*) OVERRIDES+=("$argument") ;;
    *.json) CREDIT+=("$argument") ;;
    *)
      echo "error: '$argument' is neither a .json file nor NAME=value nor key=value; see -h." >&2
      exit 2
      ;;
  esac
done
if [ "${#CREDIT[@]}" -eq 0 ]; then
  echo "error: no credit analysis given; run_credit_analysis_alfworld.sh writes credit_analysis.json. See -h." >&2
  exit 2
fi

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
  if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON=python3; fi
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
PACKAGE=agent_system.step_discriminator.discriminator_trainer
MODEL="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
OUT_DIR="${OUT_DIR:-outputs/discriminator_alfworld}"
MAX_LENGTH="${MAX_LENGTH:-4096}"
DEVICE="${DEVICE:-auto}"
SEED="${SEED:-0}"
NPROC="${NPROC:-1}"
case "$NPROC" in
  "" | *[!0-9]* | 0*)
    echo "error: NPROC='$NPROC' is no number of processes; set it to 1 or more." >&2
    exit 2
    ;;
esac
WEIGHT=()
case "${BALANCE:-0}" in
  0) ;;
  1) WEIGHT=(--balance) ;;
  *)
    echo "error: BALANCE='$BALANCE' must be 0 or 1." >&2
    exit 2
    ;;
esac

"$PYTHON" -m "$PACKAGE.prepare" "${CREDIT[@]}" \
  --model "$MODEL" \
  --out "$OUT_DIR/data" \
  --max-length "$MAX_LENGTH" \
  --val-share "${VAL_SHARE:-0.1}" \
  --seed "$SEED" \
  ${WEIGHT[@]+"${WEIGHT[@]}"}

LAUNCH=("$PYTHON")
if [ "$NPROC" -gt 1 ]; then LAUNCH=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$NPROC"); fi
"${LAUNCH[@]}" -m verl.trainer.fsdp_sft_trainer \
  data.train_files="$OUT_DIR/data/train.parquet" \
  data.val_files="$OUT_DIR/data/val.parquet" \
  data.prompt_key=prompt \
  data.response_key=response \
  data.weight_key=weight \
  data.max_length="$MAX_LENGTH" \
  data.train_batch_size=64 \
  model.partial_pretrain="$MODEL" \
  model.enable_gradient_checkpointing=True \
  optim.lr=1e-5 \
  trainer.default_local_dir="$OUT_DIR/sft" \
  trainer.default_hdfs_dir=null \
  trainer.project_name=step_discriminator \
  trainer.experiment_name=alfworld \
  trainer.total_epochs=2 \
  trainer.device="$DEVICE" \
  trainer.seed="$SEED" \
  ${OVERRIDES[@]+"${OVERRIDES[@]}"}

"$PYTHON" -m "$PACKAGE.finish" \
  --sft "$OUT_DIR/sft" \
  --out "$OUT_DIR/model" \
  --max-length "$MAX_LENGTH" \
  --threshold "${THRESHOLD:-0.5}"
"$PYTHON" -m "$PACKAGE.evaluate" \
  --model "$OUT_DIR/model" \
  --data "$OUT_DIR/data/val.parquet" \
  --report "$OUT_DIR/report" \
  --device "$DEVICE"
