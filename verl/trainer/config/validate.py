# SPDX-License-Identifier: Apache-2.0
"""Combinations of config values that cannot work, refused before a model is loaded.

Every refusal is a `UserError` whose sentence says what to set instead. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from verl.trainer.config.ppo_sections import PPOConfig
from verl.trainer.config.run_sections import DataConfig
from verl.trainer.config.sft_sections import SFTConfig
from verl.trainer.config.worker_sections import ActorConfig, CriticConfig, RefConfig, RolloutConfig
from verl.utils.errors import UserError
from verl.utils.fs import is_hdfs_path
from verl.utils.tracking import BACKENDS

__all__ = ["validate_ppo_config", "validate_sft_config"]

_NEEDED_CONTENTS = ("model", "optimizer", "extra")
Refusals = Iterable[tuple[bool, str]]


def validate_ppo_config(cfg: PPOConfig) -> None:
    """Raise UserError for the first combination in `cfg` that this version cannot run."""
    _refuse(_unsupported_rollout(cfg.actor_rollout_ref.rollout))
    _refuse(_unsupported_model(cfg))
    _refuse(_unsupported_run(cfg))
    _refuse(_contradictions(cfg))
    _check_backends(cfg.trainer.logger)
    _check_contents("actor_rollout_ref.actor.checkpoint.contents", cfg.actor_rollout_ref.actor.checkpoint.contents)
    _check_remote(
        {
            "trainer.default_hdfs_dir": cfg.trainer.default_hdfs_dir,
            "trainer.default_local_dir": cfg.trainer.default_local_dir,
            "trainer.resume_from_path": cfg.trainer.resume_from_path,
            "actor_rollout_ref.model.path": cfg.actor_rollout_ref.model.path,
            "data.train_files": cfg.data.train_files,
            "data.val_files": cfg.data.val_files,
        }
    )
    _check_sizes(cfg)


def validate_sft_config(cfg: SFTConfig, world_size: int | None = None) -> None:
    """Raise UserError for the first combination in `cfg` that this version cannot run.

    Args:
        world_size: number of ranks; None = the WORLD_SIZE that torchrun sets, 1 without it.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    _refuse(
        [
            (
                cfg.ulysses_sequence_parallel_size > 1,
                "ulysses_sequence_parallel_size above 1 is not available; set ulysses_sequence_parallel_size=1.",
            ),
            (cfg.model.lora_rank > 0, "model.lora_rank above 0 is not available; set model.lora_rank=0."),
            (cfg.model.use_liger, "model.use_liger is not available; set model.use_liger=False."),
            (
                cfg.model.use_shm or cfg.data.use_shm,
                "use_shm is not available; set model.use_shm=False and data.use_shm=False.",
            ),
            (
                cfg.data.multiturn.enable,
                "data.multiturn.enable is not available; write one row per assistant turn and set it to False.",
            ),
            (
                cfg.use_remove_padding,
                "use_remove_padding is not available here (micro-batches hold rows of similar length instead); "
                "set use_remove_padding=False.",
            ),
            (
                cfg.optim.name == "muon" and cfg.model.strategy == "fsdp",
                "optim.name=muon needs whole matrices; set model.strategy=fsdp2 or optim.name=adamw.",
            ),
            (
                cfg.data.chat_template is not None,
                "data.chat_template is not available (the tokenizer's own template is used); set it to null.",
            ),
            (
                cfg.data.custom_cls.path is not None,
                "data.custom_cls is not available; write the rows to parquet and set data.custom_cls.path=null.",
            ),
            (
                cfg.trainer.default_hdfs_dir is not None,
                "trainer.default_hdfs_dir is not supported; set it to null and copy trainer.default_local_dir later.",
            ),
        ]
    )
    _check_backends(cfg.trainer.logger)
    _check_remote(
        {
            "trainer.default_local_dir": cfg.trainer.default_local_dir,
            "trainer.resume_path": cfg.trainer.resume_path,
            "model.partial_pretrain": cfg.model.partial_pretrain,
            "data.train_files": cfg.data.train_files,
            "data.val_files": cfg.data.val_files,
        }
    )
    _check_mini_batch("data.train_batch_size", cfg.data.train_batch_size, ranks)
    _check_micro_batch(
        "data.train_batch_size",
        cfg.data.train_batch_size,
        "data.micro_batch_size_per_gpu",
        cfg.data.micro_batch_size_per_gpu,
        ranks,
    )


def _refuse(refusals: Refusals) -> None:
    for wrong, sentence in refusals:
        if wrong:
            raise UserError(sentence)


def _unsupported_rollout(rollout: RolloutConfig) -> Refusals:
    prefix = "actor_rollout_ref.rollout"
    yield (
        rollout.name != "hf",
        f"{prefix}.name={rollout.name} is not available yet; set {prefix}.name=hf.",
    )
    yield rollout.mode != "sync", f"{prefix}.mode={rollout.mode} is not available yet; set {prefix}.mode=sync."
    yield (
        rollout.n != 1,
        f"{prefix}.n={rollout.n} cannot work with environments; leave it at 1 and set the group size as env.rollout.n.",
    )
    yield (
        rollout.multi_turn.enable,
        f"{prefix}.multi_turn.enable is an engine's tool loop and not available; set it to False, "
        "the environment loop is multi-turn by itself.",
    )
    yield (
        rollout.temperature == 0,
        f"{prefix}.temperature=0 would divide logits by zero; set it above 0 (greedy validation is "
        f"{prefix}.val_kwargs.do_sample=False).",
    )
    yield (
        rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0,
        f"{prefix}.val_kwargs.do_sample=True needs {prefix}.val_kwargs.temperature above 0; "
        "set a temperature, or do_sample=False for greedy validation.",
    )
    for name in ("min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        yield getattr(rollout, name) is not None, f"{prefix}.{name} needs an engine other than hf; set it to null."
    for name in ("stop", "stop_token_ids"):
        yield getattr(rollout, name) is not None, f"{prefix}.{name} needs an engine other than hf; set it to null."
    yield (
        rollout.limit_images is not None,
        f"{prefix}.limit_images needs an environment with images, which this version lacks; set it to null.",
    )
    needed = rollout.prompt_length + rollout.response_length
    yield (
        rollout.max_model_len is not None and rollout.max_model_len < needed,
        f"{prefix}.max_model_len={rollout.max_model_len} is below prompt_length + response_length = "
        f"{rollout.prompt_length} + {rollout.response_length}; set it to {needed} or null.",
    )


def _unsupported_model(cfg: PPOConfig) -> Refusals:
    policy = cfg.actor_rollout_ref
    prefix = "actor_rollout_ref"
    yield (
        not policy.hybrid_engine,
        f"{prefix}.hybrid_engine=False is not supported (actor and rollout share processes); set it to True.",
    )
    for key, size in (
        (f"{prefix}.actor", policy.actor.ulysses_sequence_parallel_size),
        (f"{prefix}.ref", policy.ref.ulysses_sequence_parallel_size),
        ("critic", cfg.critic.ulysses_sequence_parallel_size),
    ):
        name = f"{key}.ulysses_sequence_parallel_size"
        yield size > 1, f"{name}={size} is not available yet; set {name}=1."
    yield (
        policy.model.lora_rank > 0,
        f"{prefix}.model.lora_rank={policy.model.lora_rank}: LoRA is not available; set {prefix}.model.lora_rank=0.",
    )
    for name, is_on in (
        ("use_liger", policy.model.use_liger),
        ("use_fused_kernels", policy.model.use_fused_kernels),
        ("enable_activation_offload", policy.model.enable_activation_offload),
        ("use_shm", policy.model.use_shm),
    ):
        yield is_on, f"{prefix}.model.{name}=True is not available; set {prefix}.model.{name}=False."
    for name, kind, is_used in (
        (f"{prefix}.actor.kl_loss_type", policy.actor.kl_loss_type, policy.actor.use_kl_loss),
        ("algorithm.kl_penalty", cfg.algorithm.kl_penalty, cfg.algorithm.use_kl_in_reward),
    ):
        yield is_used and kind == "full", f"{name}=full needs whole distributions and is not available; use low_var_kl."
    ranks = cfg.trainer.world_size
    size = policy.actor.fsdp_config.fsdp_size
    yield (
        size != -1 and (size < 1 or ranks % size != 0),
        f"{prefix}.actor.fsdp_config.fsdp_size={size} does not divide the {ranks} ranks; set -1 for one shard group.",
    )


def _unsupported_run(cfg: PPOConfig) -> Refusals:
    reward, algorithm, data = cfg.reward_model, cfg.algorithm, cfg.data
    yield (
        reward.enable,
        "reward_model.enable=True: reward models are not supported, the environment gives the reward; set it to False.",
    )
    yield (
        reward.launch_reward_fn_async,
        "reward_model.launch_reward_fn_async is not supported; set it to False.",
    )
    yield (
        reward.reward_manager != "episode",
        f"reward_model.reward_manager={reward.reward_manager} is not supported; set it to episode.",
    )
    yield (
        algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=True (dynamic sampling) is not available yet; set it to False.",
    )
    yield algorithm.use_pf_ppo, "algorithm.use_pf_ppo is not supported; set it to False."
    yield (
        algorithm.adv_estimator == "remax",
        "algorithm.adv_estimator=remax needs a single-turn baseline, which environments do not have; use grpo.",
    )
    yield (
        data.custom_cls.path is not None,
        "data.custom_cls is not supported, the environment defines the tasks; set data.custom_cls.path=null.",
    )
    yield (
        data.need_tools_kwargs,
        "data.need_tools_kwargs=True belongs to an engine's tool loop and is not available; set it to False.",
    )
    yield (
        cfg.custom_reward_function.path is not None,
        "custom_reward_function.path is not supported, the environment gives the reward; set it to null and reshape "
        "rewards in a recipe's after_reward hook.",
    )
    yield (
        bool(reward.reward_kwargs) or bool((reward.overlong_buffer or {}).get("enable")),
        "reward_model.reward_kwargs and reward_model.overlong_buffer belong to reward managers that are not "
        "supported; set both to null.",
    )
    yield data.use_shm, "data.use_shm=True is not available; set data.use_shm=False."
    yield (
        not data.shuffle,
        "data.shuffle=False is not available, tasks come in a seeded random order; set data.shuffle=True.",
    )
    yield (
        cfg.trainer.log_val_generations > 0,
        "trainer.log_val_generations is not available; set it to 0, whole validation episodes are in "
        "trainer.default_local_dir/validation.",
    )
    yield (
        cfg.trainer.log_llm_steps,
        "trainer.log_llm_steps is not available; set trainer.rollout_data_dir to get every turn as JSON lines.",
    )


def _contradictions(cfg: PPOConfig) -> Refusals:
    data, trainer = cfg.data, cfg.trainer
    yield (
        data.gen_batch_size != data.train_batch_size,
        f"data.gen_batch_size={data.gen_batch_size} must equal data.train_batch_size={data.train_batch_size} "
        "with environments; leave data.gen_batch_size unset.",
    )
    rollout = cfg.actor_rollout_ref.rollout
    yield (
        rollout.prompt_length != data.max_prompt_length,
        f"actor_rollout_ref.rollout.prompt_length={rollout.prompt_length} must equal data.max_prompt_length="
        f"{data.max_prompt_length}; leave the former unset.",
    )
    yield (
        data.seed != DataConfig.seed,
        f"data.seed={data.seed} is not read, the environment orders the tasks; set env.seed={data.seed} instead.",
    )
    yield (
        trainer.resume_mode == "resume_path" and trainer.resume_from_path is None,
        "trainer.resume_mode=resume_path needs trainer.resume_from_path; set it to a global_step_N folder.",
    )
    yield (
        trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None,
        f"trainer.resume_from_path is set but trainer.resume_mode={trainer.resume_mode} ignores it; "
        "set trainer.resume_mode=resume_path.",
    )
    yield (
        trainer.resume_from_path is not None and "global_step_" not in trainer.resume_from_path,
        f"trainer.resume_from_path={trainer.resume_from_path} names no checkpoint; give a global_step_N folder.",
    )


def _check_backends(names: tuple[str, ...]) -> None:
    for name in names:
        if name in BACKENDS:
            continue
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UserError(f"trainer.logger: {name} is not one of the trackers {', '.join(BACKENDS)}{hint}")


def _check_contents(key: str, contents: tuple[str, ...]) -> None:
    missing = [item for item in _NEEDED_CONTENTS if item not in contents]
    if missing:
        wanted = ",".join((*_NEEDED_CONTENTS, *(item for item in contents if item not in _NEEDED_CONTENTS)))
        raise UserError(f"{key} lacks {', '.join(missing)}, without which a run cannot resume; set {key}=[{wanted}].")


def _check_remote(values: dict[str, str | tuple[str, ...] | None]) -> None:
    for key, value in values.items():
        for path in (value,) if isinstance(value, str) else value or ():
            if is_hdfs_path(path) or key.endswith("hdfs_dir"):
                raise UserError(f"{key}={path}: remote folders are not supported; use a local folder and set {key} so.")


def _check_sizes(cfg: PPOConfig) -> None:
    ranks = cfg.trainer.world_size
    policy = cfg.actor_rollout_ref
    _check_pass("actor_rollout_ref.rollout", policy.rollout, policy.rollout.log_prob_use_dynamic_bsz)
    if cfg.use_reference:
        _check_pass("actor_rollout_ref.ref", policy.ref, policy.ref.log_prob_use_dynamic_bsz)
    _check_update("actor_rollout_ref.actor", policy.actor, ranks)
    if cfg.use_critic:
        _check_update("critic", cfg.critic, ranks)


def _check_pass(prefix: str, section: RolloutConfig | RefConfig, dynamic: bool) -> None:
    """A forward-only pass works with any number of rows; it needs a micro-batch size or a token budget."""
    if not dynamic:
        _check_pair(
            f"{prefix}.log_prob_micro_batch_size",
            section.log_prob_micro_batch_size,
            section.log_prob_micro_batch_size_per_gpu,
        )


def _check_update(prefix: str, section: ActorConfig | CriticConfig, ranks: int) -> None:
    key, mini = f"{prefix}.ppo_mini_batch_size", section.ppo_mini_batch_size
    _check_mini_batch(key, mini, ranks)
    if section.use_dynamic_bsz:
        return
    micro_key, micro = f"{prefix}.ppo_micro_batch_size", section.ppo_micro_batch_size_per_gpu
    _check_pair(micro_key, section.ppo_micro_batch_size, micro)
    if micro is None:
        raise UserError(
            f"{micro_key}={section.ppo_micro_batch_size} does not divide by the {ranks} ranks; set "
            f"{micro_key}_per_gpu to the rows of one rank instead."
        )
    _check_micro_batch(key, mini, f"{micro_key}_per_gpu", micro, ranks)


def _check_pair(key: str, old: int | None, per_gpu: int | None) -> None:
    if old is None and per_gpu is None:
        raise UserError(f"{key}_per_gpu is not set; set it to the rows of one forward pass, for example 8.")
    if old is not None and per_gpu is not None:
        raise UserError(f"{key}={old} and {key}_per_gpu={per_gpu} are both set; keep only {key}_per_gpu.")


def _check_mini_batch(key: str, mini: int, ranks: int) -> None:
    if mini % ranks == 0:
        return
    below, above = mini // ranks * ranks, (mini // ranks + 1) * ranks
    choices = f"{above}" if below == 0 else f"{below} or {above}"
    raise UserError(f"{key}={mini} rows cannot be shared equally by {ranks} ranks; set {key} to {choices}.")


def _check_micro_batch(mini_key: str, mini: int, micro_key: str, micro: int, ranks: int) -> None:
    rows = mini // ranks
    if rows % micro == 0:
        return
    divisor = max(size for size in range(1, min(micro, rows) + 1) if rows % size == 0)
    larger = -(-rows // micro) * micro * ranks
    raise UserError(
        f"{micro_key}={micro} does not divide the {rows} rows that each of {ranks} ranks gets of {mini_key}={mini}; "
        f"set {micro_key}={divisor} or {mini_key}={larger}."
    )
