# Shared by the launch scripts: source it first thing, with the script's own arguments.
#   source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"
# Sets
#   ROOT       the repository; also the working directory from here on
#   PYTHON     the interpreter: $PYTHON, else the repository's .venv, else python3
#   ENGINE     the rollout engine: the first argument if it is a bare word, else vllm
#   OVERRIDES  array with all the other arguments (Hydra overrides, applied last)
#   AGENT_GRPO array with the overrides that every GRPO-style run of an agent shares
#   ALFWORLD_1_5B array with the sizes of an ALFWorld run of a 1.5 B model on two GPUs
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 0
fi
if [ -z "${PYTHON:-}" ]; then
  if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON=python3; fi
fi
ENGINE=vllm
case "${1:-}" in
  "" | *=* | [-+~]*) ;;
  *) ENGINE="$1"; shift ;;
esac
OVERRIDES=("$@")

AGENT_GRPO=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=False
  data.truncation=error
  data.return_raw_chat=True
  data.filter_overlong_prompts=True
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.use_kl_loss=True
  actor_rollout_ref.actor.kl_loss_coef=0.01
  actor_rollout_ref.actor.kl_loss_type=low_var_kl
  actor_rollout_ref.actor.use_invalid_action_penalty=True
  actor_rollout_ref.actor.invalid_action_penalty_coef=0.1
  actor_rollout_ref.actor.fsdp_config.param_offload=False
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
  actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.model.enable_gradient_checkpointing=True
  actor_rollout_ref.ref.fsdp_config.param_offload=True
  actor_rollout_ref.rollout.name="$ENGINE"
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  actor_rollout_ref.rollout.enable_chunked_prefill=False
  actor_rollout_ref.rollout.enforce_eager=False
  actor_rollout_ref.rollout.free_cache_engine=False
  actor_rollout_ref.rollout.val_kwargs.temperature=0.4
  actor_rollout_ref.rollout.val_kwargs.do_sample=True
  env.seed=0
  env.resources_per_worker.num_cpus=0.1
  trainer.critic_warmup=0
  trainer.logger=[console,wandb]
  trainer.n_gpus_per_node=2
  trainer.nnodes=1
  trainer.save_freq=-1
  trainer.test_freq=5
  trainer.val_before_train=True
)

ALFWORLD_1_5B=(
  data.train_batch_size=16
  data.val_batch_size=128
  data.max_prompt_length=2048
  data.max_response_length=512
  actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=256
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
  env.env_name=alfworld/AlfredTWEnv
  env.max_steps=50
  env.rollout.n=8
  trainer.project_name=verl_agent_alfworld
  trainer.total_epochs=150
)
