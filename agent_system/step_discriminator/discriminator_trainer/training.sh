# Stage 2, sourced by run_training_<env>.sh with the script's arguments; ENV_NAME says which environment. The variables
# are described in the scripts.
set -euo pipefail
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 0
fi
CREDIT=()
OVERRIDES=()
for argument in "$@"; do
  case "$argument" in
    MODEL=* | OUT_DIR=* | MAX_LENGTH=* | VAL_SHARE=* | BALANCE=* | LABEL_SOURCE=* | THRESHOLD=* | NPROC=* | DEVICE=* | SEED=* | PYTHON=*)
      printf -v "${argument%%=*}" '%s' "${argument#*=}"
      ;;
    [[:upper:]]*=*)
      echo "error: unknown argument '$argument'; see -h for the names." >&2
      exit 2
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
  echo "error: no credit analysis given; run_credit_analysis_$ENV_NAME.sh writes credit_analysis.json. See -h." >&2
  exit 2
fi

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
  if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON=python3; fi
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
PACKAGE=agent_system.step_discriminator.discriminator_trainer
MODEL="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
OUT_DIR="${OUT_DIR:-outputs/discriminator_$ENV_NAME}"
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
LABELS=()
if [ -n "${LABEL_SOURCE:-}" ]; then LABELS=(--label-source "$LABEL_SOURCE"); fi

"$PYTHON" -m "$PACKAGE.prepare" "${CREDIT[@]}" \
  --model "$MODEL" \
  --out "$OUT_DIR/data" \
  --max-length "$MAX_LENGTH" \
  --val-share "${VAL_SHARE:-0.1}" \
  --seed "$SEED" \
  ${LABELS[@]+"${LABELS[@]}"} \
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
  trainer.experiment_name="$ENV_NAME" \
  trainer.total_epochs=2 \
  trainer.device="$DEVICE" \
  trainer.seed="$SEED" \
  ${OVERRIDES[@]+"${OVERRIDES[@]}"}

"$PYTHON" -m "$PACKAGE.finish" \
  --sft "$OUT_DIR/sft" \
  --data "$OUT_DIR/data" \
  --out "$OUT_DIR/model" \
  --threshold "${THRESHOLD:-0.5}"
"$PYTHON" -m "$PACKAGE.evaluate" \
  --model "$OUT_DIR/model" \
  --data "$OUT_DIR/data/val.parquet" \
  --report "$OUT_DIR/report" \
  --device "$DEVICE"
