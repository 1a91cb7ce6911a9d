# SPDX-License-Identifier: Apache-2.0
"""Combinations of config values that cannot work, refused before a model is loaded.

Every refusal is a `UserError` whose sentence says what to set instead. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from verl.trainer.config.ppo_sections import PPOConfig
from verl.trainer.config.run_sections import DataConfig
from verl.trainer.config.validate_sizes import (
    check_critic_sizes,
    check_policy_sizes,
)
from verl.trainer.config.worker_sections import RolloutConfig
from verl.utils.errors import UserError
from verl.utils.fs import is_hdfs_path
from verl.utils.import_utils import is_installed
from verl.utils.tracking import BACKENDS
from verl.workers.rollout.engines import engine_problem

__all__ = ["check_backends", "check_remote", "refuse", "unsupported_engine", "validate_critic", "validate_ppo_config"]

_NEEDED_CONTENTS = ("model", "optimizer", "extra")
Refusals = Iterable[tuple[bool, str]]


def validate_ppo_config(cfg: PPOConfig) -> None:
    """Raise UserError for the first combination in `cfg` that this version cannot run."""
    rollout = cfg.actor_rollout_ref.rollout
    refuse(unsupported_engine(rollout, "actor_rollout_ref.rollout", cfg.trainer.world_size))
    refuse(_unsupported_sampling(rollout, "actor_rollout_ref.rollout"))
    refuse(_unsupported_model(cfg))
    refuse(_unsupported_run(cfg))
    refuse(_contradictions(cfg))
    check_backends(cfg.trainer.logger)
    _check_contents("actor_rollout_ref.actor.checkpoint.contents", cfg.actor_rollout_ref.actor.checkpoint.contents)
    check_remote(
        {
            "trainer.default_hdfs_dir": cfg.trainer.default_hdfs_dir,
            "trainer.default_local_dir": cfg.trainer.default_local_dir,
            "trainer.resume_from_path": cfg.trainer.resume_from_path,
            "actor_rollout_ref.model.path": cfg.actor_rollout_ref.model.path,
            "data.train_files": cfg.data.train_files,
            "data.val_files": cfg.data.val_files,
        }
    )
    check_policy_sizes(cfg)
    if cfg.use_critic:
        validate_critic(cfg)


def validate_critic(cfg: PPOConfig) -> None:
    """Raise UserError for keys of the section `critic` that cannot work; for estimators with a value model."""
    critic = cfg.critic
    refuse(
        (is_on, f"critic.model.{name}=True is not available; set critic.model.{name}=False.")
        for name, is_on in (
            ("enable_activation_offload", critic.model.enable_activation_offload),
            ("use_shm", critic.model.use_shm),
        )
    )
    _check_contents("critic.checkpoint.contents", critic.checkpoint.contents)
    check_critic_sizes(cfg)


def refuse(refusals: Refusals) -> None:
    for wrong, sentence in refusals:
        if wrong:
            raise UserError(sentence)


def unsupported_engine(rollout: RolloutConfig, prefix: str, ranks: int) -> Refusals:
    """What no program can do with a generation engine on `ranks` ranks; `prefix` is the key of the section."""
    problem = engine_problem(rollout.name, f"{prefix}.name")
    yield problem is not None, problem or ""
    yield from _unsupported_hf(rollout, prefix) if rollout.name == "hf" else _unsupported_vllm(rollout, prefix, ranks)
    yield (
        rollout.multi_turn.enable,
        f"{prefix}.multi_turn.enable is an engine's tool loop and not available; set it to False, "
        "the environment loop is multi-turn by itself.",
    )
    yield (
        rollout.limit_images is not None,
        f"{prefix}.limit_images needs an environment with images, which this version lacks; set it to null.",
    )
    needed = rollout.max_row_length
    yield (
        rollout.max_model_len is not None and rollout.max_model_len < needed,
        f"{prefix}.max_model_len={rollout.max_model_len} is below prompt_length + response_length = "
        f"{rollout.prompt_length} + {rollout.response_length}; set it to {needed} or null.",
    )


def _unsupported_hf(rollout: RolloutConfig, prefix: str) -> Refusals:
    for name in (
        "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids",
    ):  # fmt: skip
        yield (
            getattr(rollout, name) is not None,
            f"{prefix}.{name} needs an engine other than hf; set it to null, or {prefix}.name=vllm.",
        )


def _unsupported_vllm(rollout: RolloutConfig, prefix: str, ranks: int) -> Refusals:
    size = rollout.tensor_model_parallel_size
    yield (
        ranks % size != 0,
        f"{prefix}.tensor_model_parallel_size={size} does not divide the {ranks} ranks; set it to 1, or to a divisor.",
    )
    longest, batched = rollout.max_model_len or rollout.max_row_length, rollout.max_num_batched_tokens
    yield (
        not rollout.enable_chunked_prefill and batched < longest,
        f"{prefix}.max_num_batched_tokens={batched} is below the {longest} tokens of the longest row, and "
        f"{prefix}.enable_chunked_prefill=False cannot cut it; set the former to {longest} or the latter to True.",
    )
    yield (
        rollout.enforce_eager and rollout.cudagraph_capture_sizes is not None,
        f"{prefix}.cudagraph_capture_sizes has no effect with {prefix}.enforce_eager=True; set that to False, or the "
        "sizes to null.",
    )


def _unsupported_sampling(rollout: RolloutConfig, prefix: str) -> Refusals:
    yield (
        rollout.n != 1,
        f"{prefix}.n={rollout.n} cannot work with environments; leave it at 1 and set the group size as env.rollout.n.",
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
        policy.model.use_liger and not is_installed("liger_kernel"),
        f"{prefix}.model.use_liger=True needs the package liger-kernel, which is not installed; "
        f"set {prefix}.model.use_liger=False.",
    )
    for name, is_on in (
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
        algorithm.filter_groups.enable and cfg.env.group_size < 2,
        "algorithm.filter_groups.enable=True keeps groups whose episodes differ, and env.rollout.n="
        f"{cfg.env.rollout.n} makes groups of one; set env.rollout.n to 2 or more, or filter_groups.enable to False.",
    )
    yield (
        algorithm.use_pf_ppo and algorithm.adv_estimator != "gae",
        "algorithm.use_pf_ppo=True resamples the rows of a value-model run; set algorithm.adv_estimator=gae, or "
        "use_pf_ppo to False.",
    )
    correction = algorithm.rollout_correction
    low, high = correction.bounds
    yield (
        correction.rollout_rs is None
        and (correction.rollout_rs_threshold is not None or correction.rollout_rs_threshold_lower is not None),
        "algorithm.rollout_correction.rollout_rs_threshold has no effect without rollout_rs; set "
        "algorithm.rollout_correction.rollout_rs=sequence, or the thresholds to null.",
    )
    rollout = cfg.actor_rollout_ref.rollout
    yield (
        correction.is_on and (rollout.top_p < 1.0 or rollout.top_k > 0),
        f"algorithm.rollout_correction compares the engine's distribution, which top_p={rollout.top_p:g} and top_k="
        f"{rollout.top_k} cut, with the policy's, which nothing cuts: every row would seem far away; set "
        "actor_rollout_ref.rollout.top_p=1 and top_k=-1, or rollout_is and rollout_rs to null.",
    )
    yield (
        correction.rollout_rs is not None and not low < 1.0 < high,
        f"algorithm.rollout_correction keeps ratios from {low:g} to {high:g}, which must include 1, the ratio of equal "
        "distributions; set rollout_rs_threshold above 1 and rollout_rs_threshold_lower below 1.",
    )
    yield (
        algorithm.adv_estimator == "remax",
        "algorithm.adv_estimator=remax needs the reward of a greedy episode of every task as its baseline, which the "
        "rollout does not play; set algorithm.adv_estimator=rloo, whose baseline is the group's other episodes.",
    )
    yield (
        algorithm.adv_estimator == "grpo_passk" and cfg.env.group_size < 2,
        f"algorithm.adv_estimator=grpo_passk compares the two best episodes of a group, and env.rollout.n="
        f"{cfg.env.rollout.n} makes groups of one; set env.rollout.n to 2 or more.",
    )
    yield (
        algorithm.gigpo.enable_similarity and algorithm.gigpo.similarity_thresh in (0.0, 1.0),
        f"algorithm.gigpo.similarity_thresh={algorithm.gigpo.similarity_thresh} must lie between 0 and 1, both "
        "excluded; equal observations only are algorithm.gigpo.enable_similarity=False.",
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
        rollout.mode == "async" and data.train_batch_size * cfg.env.group_size < 2,
        "actor_rollout_ref.rollout.mode=async lets one part of the episodes generate while the other's environments "
        "step, and data.train_batch_size * env.rollout.n is one episode; set mode=sync.",
    )
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


def check_backends(names: tuple[str, ...]) -> None:
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


def check_remote(values: dict[str, str | tuple[str, ...] | None]) -> None:
    for key, value in values.items():
        for path in (value,) if isinstance(value, str) else value or ():
            if is_hdfs_path(path) or key.endswith("hdfs_dir"):
                raise UserError(f"{key}={path}: remote folders are not supported; use a local folder and set {key} so.")
