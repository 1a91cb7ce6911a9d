# Shared by the launch scripts: source it first thing, with the script's own arguments.
#   source "$(dirname "${BASH_SOURCE[0]}")/../common.sh" "$@"
# Sets
#   ROOT       the repository; also the working directory from here on
#   PYTHON     the interpreter: $PYTHON, else the repository's .venv, else python3
#   WORDS      array with the leading arguments that are bare words
#   ENGINE     the rollout engine: the first of them, else vllm
#   OVERRIDES  array with all the other arguments (Hydra overrides and flags, applied last)
# and arrays of overrides; where two of them set a key, the later one on the command line wins:
#   AGENT_GRPO     what every run of an agent shares, with GRPO as the estimator
#   ALFWORLD_1_5B  sizes of an ALFWorld run of a 1.5 B model on two GPUs
#   WEBSHOP_1_5B   the same for WebShop
#   GIGPO, HGPO    estimators with groups of equal steps (the mode is the script's)
#   DYNAMIC        dynamic sampling and clip-higher
#   CRITIC_1_5B    PPO: estimator gae with a value model, 128 groups of one episode
#   LORA_7B        a 7 B model trained through adapters, without KL
# and functions that run a program in place of the shell, with the given overrides and then OVERRIDES:
#   launch MODULE [key=value ...]
#   launch_sft [key=value ...]     fine-tuning; WORDS are NPROC (1) and the folder to save in (outputs/sft)
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
WORDS=()
while [ $# -gt 0 ]; do
  case "$1" in
    "" | *=* | [-+~]*) break ;;
    *) WORDS+=("$1"); shift ;;
  esac
done
ENGINE="${WORDS[0]:-vllm}"
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

WEBSHOP_1_5B=(
  data.train_batch_size=16
  data.val_batch_size=128
  data.max_prompt_length=4096
  data.max_response_length=512
  actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
  env.env_name=Webshop
  env.max_steps=15
  env.rollout.n=8
  trainer.project_name=verl_agent_webshop
  trainer.total_epochs=150
)

GIGPO=(
  algorithm.adv_estimator=gigpo
  algorithm.gamma=0.95
  algorithm.gigpo.step_advantage_w=1.0
)

HGPO=(
  algorithm.adv_estimator=hgpo
  algorithm.gamma=0.95
  algorithm.hgpo.weight_type=length
  algorithm.hgpo.length_weight_alpha=1.0
  algorithm.hgpo.base_group=False
)

DYNAMIC=(
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.28
  algorithm.filter_groups.enable=True
  algorithm.filter_groups.max_num_gen_batches=10
)

CRITIC_1_5B=(
  algorithm.adv_estimator=gae
  data.train_batch_size=128
  env.rollout.n=1
  critic.optim.lr=1e-5
  critic.model.path=Qwen/Qwen2.5-1.5B-Instruct
  critic.model.use_remove_padding=True
  critic.model.enable_gradient_checkpointing=True
  critic.model.fsdp_config.param_offload=False
  critic.model.fsdp_config.optimizer_offload=False
)

LORA_7B=(
  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct
  actor_rollout_ref.model.lora_rank=64
  actor_rollout_ref.model.lora_alpha=64
  actor_rollout_ref.actor.optim.lr=3e-6
  actor_rollout_ref.actor.use_kl_loss=False
)

launch() {
  # A second bare word is no engine: the program says what is wrong with it.
  exec "$PYTHON" -m "$@" ${WORDS[@]+"${WORDS[@]:1}"} ${OVERRIDES[@]+"${OVERRIDES[@]}"}
}

launch_sft() {
  local run=("$PYTHON") nproc="${WORDS[0]:-1}"
  if [ "$nproc" != 1 ]; then
    run+=(-m torch.distributed.run --standalone --nnodes=1 --nproc_per_node="$nproc")
  fi
  exec "${run[@]}" -m verl.trainer.fsdp_sft_trainer "$@" \
    trainer.default_local_dir="${WORDS[1]:-outputs/sft}" \
    ${WORDS[@]+"${WORDS[@]:2}"} ${OVERRIDES[@]+"${OVERRIDES[@]}"}
}
