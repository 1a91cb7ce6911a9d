# SPDX-License-Identifier: Apache-2.0
"""The training program: one step is a list of named phases, each a method of :class:`RayPPOTrainer`.

The trainer knows neither environments nor credit methods: it is given a trajectory collector, a validator and hooks
(:mod:`verl.trainer.ppo.recipes`), and it drives worker groups through whatever controller made them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup
from verl.trainer.config.validate import validate_critic
from verl.trainer.ppo import batch_ops, core_algos
from verl.trainer.ppo.batch_ops import (
    apply_invalid_action_penalty,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.checkpointing import CheckpointStore, TrainerState, load_state
from verl.trainer.ppo.columns import MODEL_COLUMNS, tensors_of
from verl.trainer.ppo.dynamic_sampling import GroupSampler
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.recipes import TrainerContext, TrainerHook, load_hooks, save_hooks
from verl.trainer.ppo.roles import AdvantageEstimator, ResourcePoolManager, Role, WorkerType
from verl.trainer.ppo.rollout_correction import add_rollout_correction, check_engine, correct_rows
from verl.trainer.ppo.step import (
    Collector,
    EpisodeWriter,
    Phase,
    RewardFn,
    RolloutResult,
    StepState,
    Validator,
    _timer,
)
from verl.trainer.ppo.texts import choose_samples, write_turns
from verl.trainer.ppo.worker_groups import (
    ACTOR_ROLLOUT,
    CRITIC,
    REF,
    WorkerGroupFactory,
    core_roles,
    merge_roles,
    score_rows,
)
from verl.utils.errors import UserError
from verl.utils.tracking import Tracking
from verl.workers.rollout.session import rollout_session

if TYPE_CHECKING:
    from verl.trainer.config.schema import PPOConfig

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "StepState",
    "WorkerType",
    "_timer",
    "apply_invalid_action_penalty",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_data_metrics",
    "compute_response_mask",
    "compute_timing_metrics",
]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
# Names the generator that resamples rows, so that it shares no draw with other generators of a step.
PF_PPO_STREAM = 1
UPDATE_COLUMNS = (*MODEL_COLUMNS, "response_mask", "old_log_probs", "advantages")
CRITIC_COLUMNS = (*MODEL_COLUMNS, "response_mask", "values", "returns")


def check_algorithm(config: PPOConfig) -> None:
    """Refuse estimators and losses that are not registered, and what cannot go with them, before a model is loaded.

    Raises:
        UserError: names the known ones, or what to set instead.
    """
    estimator = core_algos.get_adv_estimator(config.algorithm.adv_estimator)
    if estimator.needs_critic:
        validate_critic(config)
    core_algos.get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    core_algos.get_kl_controller(config.algorithm.kl_ctrl)


def for_workers(config: PPOConfig, total_steps: int) -> PPOConfig:
    """The config with what the workers' sections take from others: the length of the schedules, the sampling seed.

    A schedule is as long as there are updates. The policy is not updated before step ``trainer.critic_warmup``: its
    schedule ends with the run all the same. ``rollout.seed`` is ``env.seed`` where it is null.
    """
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    updates = max(total_steps - max(config.trainer.critic_warmup - 1, 0), 1)
    actor = replace(policy.actor, optim=replace(policy.actor.optim, total_training_steps=updates))
    rollout = replace(rollout, seed=config.env.seed if rollout.seed is None else rollout.seed)
    critic = replace(config.critic, optim=replace(config.critic.optim, total_training_steps=total_steps))
    return replace(config, actor_rollout_ref=replace(policy, actor=actor, rollout=rollout), critic=critic)


class RayPPOTrainer:
    """Runs training steps, validation and checkpoints; :meth:`fit` is the program.

    Args:
        config: the validated config.
        tokenizer: of the policy; only used to write text.
        collector, validator, reward_fn: see :mod:`verl.trainer.ppo.step`; ``reward_fn(batch, return_dict=True)`` gives
            ``{"reward_tensor": (B, R), "reward_extra_info": {name: (B,)}}``.
        train_envs, val_envs: environment managers. The training one has ``state_dict``/``load_state_dict`` (position
            in its task stream).
        make_worker_groups: see :mod:`verl.trainer.ppo.worker_groups`.
        device: ``cpu`` or ``cuda``.
        hooks: of the enabled recipes, in order.
        steps_per_epoch: training steps of one pass over the prompts.
        save_episodes: writes whole episodes to a file (None: only the rows are dumped).
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        *,
        collector: Collector,
        validator: Validator,
        reward_fn: RewardFn,
        train_envs: Any,
        val_envs: Any,
        make_worker_groups: WorkerGroupFactory,
        device: str = "cpu",
        hooks: Sequence[TrainerHook] = (),
        steps_per_epoch: int = 1,
        save_episodes: EpisodeWriter | None = None,
    ) -> None:
        check_algorithm(config)
        self.total_steps = config.trainer.total_training_steps or steps_per_epoch * config.trainer.total_epochs
        self.config = for_workers(config, self.total_steps)
        self.tokenizer = tokenizer
        self.collector, self.validator, self.reward_fn = collector, validator, reward_fn
        self.train_envs, self.val_envs = train_envs, val_envs
        self.device = device
        self.hooks = tuple(hooks)
        self.steps_per_epoch = steps_per_epoch
        self.save_episodes = save_episodes
        self.global_step = 0
        self.epoch = 0
        self.kl_ctrl = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        self.estimator = core_algos.get_adv_estimator(config.algorithm.adv_estimator)
        self.use_critic = self.estimator.needs_critic
        self.reference_role = ACTOR_ROLLOUT if config.actor_rollout_ref.model.lora_rank > 0 else REF
        self.store = CheckpointStore(config.trainer.default_local_dir, self._checkpoint_parts())
        self.worker_groups: dict[str, WorkerGroup] = {}
        self._make_worker_groups = make_worker_groups
        self._last_announced = time.monotonic()
        self.phases = self._list_phases()

    # -- start and end ------------------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Start the worker processes and build the models: critic, reference, hooks' roles, actor with engine last."""
        core = core_roles(self.config, self.device, use_critic=self.use_critic)
        roles = merge_roles(core, *(hook.worker_roles(self.config) for hook in self.hooks))
        self.worker_groups = self._make_worker_groups(roles)
        for role in (CRITIC, REF):
            if role in core:
                logger.info("building the model of role %s", role)
                group: Any = self.worker_groups[role]
                group.init_model()
        for hook in self.hooks:
            hook.init_workers(self._context(StepState(self.global_step)))
        logger.info("building the policy and its rollout engine")
        self.actor_rollout_wg.init_model()
        correction = self.config.algorithm.rollout_correction
        if correction.is_on:
            check_engine(correction, all(self.actor_rollout_wg.gives_log_probs()))

    @property
    def actor_rollout_wg(self) -> Any:
        return self.worker_groups[ACTOR_ROLLOUT]

    @property
    def world_size(self) -> int:
        return int(self.actor_rollout_wg.world_size)

    def fit(self) -> None:
        """Resume if there is a checkpoint, validate if asked, then train to the last step."""
        self._resume()
        tracking = self._open_tracking()
        try:
            if self._validates_first():
                self._validate_only(tracking)
            if self.config.trainer.val_only:
                return
            if self.global_step >= self.total_steps:
                logger.warning(
                    "the checkpoint is at step %d of %d: nothing is left to train (raise trainer.total_epochs or "
                    "trainer.total_training_steps to go on)", self.global_step, self.total_steps,
                )  # fmt: skip
            while self.global_step < self.total_steps:
                self._train_step(tracking)
        finally:
            for hook in self.hooks:
                hook.close()
            tracking.close()

    def _open_tracking(self) -> Tracking:
        trainer = self.config.trainer
        return Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            backends=trainer.logger,
            log_dir=self.store.root,
            config=asdict(self.config),
        )

    def _validates_first(self) -> bool:
        trainer = self.config.trainer
        return trainer.val_only or (trainer.val_before_train and self.global_step == 0)

    def _validate_only(self, tracking: Tracking) -> None:
        state = StepState(self.global_step)
        with state.timer("testing"):
            self.validate(state)
        tracking.log(state.metrics | {"timing_s/testing": state.timing["testing"]}, step=self.global_step)
        tracking.log_generations(state.generations, step=self.global_step)

    # -- the step -----------------------------------------------------------------------------------------------------

    def _list_phases(self) -> list[Phase]:
        """The training step, in order. Validation and checkpoint come last, after the epoch's end."""

        def always(step: int) -> bool:
            return True

        def with_hooks(step: int) -> bool:
            return bool(self.hooks)

        def with_reference(step: int) -> bool:
            return self.config.use_reference

        def with_dump(step: int) -> bool:
            return self.config.trainer.rollout_data_dir is not None

        def at_epoch_end(step: int) -> bool:
            return step % self.steps_per_epoch == 0

        def filters(step: int) -> bool:
            return self.config.algorithm.filter_groups.enable

        def with_critic(step: int) -> bool:
            return self.use_critic

        def after_warmup(step: int) -> bool:
            return self.config.trainer.critic_warmup <= step

        return [
            Phase("gen", self.collect_rollout, lambda step: not filters(step)),
            Phase("after_rollout", self._hooks_after_rollout, lambda step: with_hooks(step) and not filters(step)),
            Phase("dynamic_sampling", self.collect_filtered_rollout, filters, timed=False),
            Phase("prepare", self.prepare_batch, always, timed=False),
            Phase("old_log_prob", self.compute_old_log_prob, always),
            Phase("ref", self.compute_ref_log_prob, with_reference),
            Phase("values", self.compute_values, with_critic),
            Phase("after_log_prob", self._hooks_after_log_prob, with_hooks),
            Phase("reward", self.compute_reward, always),
            Phase("after_reward", self._hooks_after_reward, with_hooks),
            Phase("adv", self.compute_advantages, always),
            Phase("after_advantage", self._hooks_after_advantage, with_hooks),
            Phase("prepare_update", self.prepare_update, always, timed=False),
            Phase("update_critic", self.update_critic, with_critic),
            Phase("update_actor", self.update_actor, after_warmup),
            Phase("dump_rollout_generations", self.dump_rollout, with_dump),
            Phase("epoch_end", self.end_epoch, at_epoch_end, timed=False),
            Phase("testing", self.validate, lambda step: self._due(self.config.trainer.test_freq, step)),
        ]

    def _due(self, freq: int, step: int) -> bool:
        """Whether something done every ``freq`` steps, and at the last one, is due; ``freq <= 0``: never."""
        return freq > 0 and (step % freq == 0 or step >= self.total_steps)

    def _train_step(self, tracking: Tracking) -> None:
        state = StepState(self.global_step + 1)
        for phase in self.phases:
            if not phase.when(state.step):
                continue
            self._announce(state.step, phase.name)
            if phase.timed:
                with state.timer(phase.name):
                    phase.run(state)
            else:
                phase.run(state)
        self.global_step = state.step
        if self._due(self.config.trainer.save_freq, state.step):
            self.save_checkpoint(state, then=lambda: self._log_step(state, tracking))
        else:
            self._log_step(state, tracking)

    def _announce(self, step: int, phase: str) -> None:
        """A sign of life: every phase at level DEBUG, one at INFO when nothing was said for a while."""
        now = time.monotonic()
        quiet = now - self._last_announced > HEARTBEAT_S
        if quiet:
            self._last_announced = now
        logger.log(logging.INFO if quiet else logging.DEBUG, "step %d/%d: %s", step, self.total_steps, phase)

    def collect_rollout(self, state: StepState) -> None:
        """Play ``train_batch_size`` groups of episodes."""
        with self._session(state):
            result = self._play(state)
        state.take(result)
        state.metrics.update(result.metrics)

    def collect_filtered_rollout(self, state: StepState) -> None:
        """Play generation batches until ``train_batch_size`` groups have episodes that differ; go on with those.

        The hooks see every generation batch whole, before any of its groups is dropped. They compute on the devices
        that the engine fills, so it rests while they do; without hooks one weight sync serves all batches of the step.
        """
        sampler = GroupSampler(self.config.data.train_batch_size, self.config.algorithm.filter_groups, state.step)
        parts: list[RolloutResult] = []
        step_session, batch_session = (nullcontext, self._session) if self.hooks else (self._session, nullcontext)
        with step_session(state):
            while not sampler.is_done:
                with state.timer("gen"), batch_session(state):
                    parts.append(self._play(state, generation=sampler.num_batches))
                state.take(parts[-1])
                if self.hooks:
                    with state.timer("after_rollout"):
                        self._hooks_after_rollout(state)
                sampler.add(state.batch)
                # At once, so that the memory of dropped groups is free for the next batch.
                parts = [self.collector.merge(parts, sampler.chosen())]
                state.take(parts[0])
        state.metrics.update(parts[0].metrics)
        state.metrics.update(sampler.metrics())

    def _session(self, state: StepState) -> AbstractContextManager[None]:
        """The engine with this step's weights."""
        return rollout_session(self.actor_rollout_wg, version=state.step)

    def _play(self, state: StepState, generation: int = 0) -> RolloutResult:
        """One generation batch, inside a session."""
        return self.collector.multi_turn_loop(
            self.train_envs,
            self.actor_rollout_wg,
            step=state.step,
            num_tasks=self.config.data.train_batch_size,
            group_size=self.config.env.group_size,
            generation=generation,
        )

    def prepare_batch(self, state: StepState) -> None:
        """Response mask, step returns where the estimator reads them, the reference's early padding where asked."""
        batch = state.batch
        tensors_of(batch)["response_mask"] = compute_response_mask(batch)
        if self.estimator.needs_step_returns:
            tensors_of(batch)["step_rewards"] = batch_ops.compute_step_returns(batch, self.config.algorithm.gamma)
        if self.config.trainer.adjust_before_advantage:
            divisor = batch_ops.reference_divisor(self.config, self.world_size, self.config.use_reference)
            rng = np.random.default_rng([self.config.env.seed, state.step])
            state.rollout, added = batch_ops.duplicate_rows(batch, divisor, rng)
            state.metrics["training/duplicated_rows"] = added

    def compute_old_log_prob(self, state: StepState) -> None:
        """Log-probs of the sampled tokens under the policy before the update; its entropy; distance to the engine."""
        batch = state.batch
        scored = self._on_workers(self.actor_rollout_wg.compute_log_prob, batch)
        entropys: Any = tensors_of(scored).pop("entropys")
        batch.union(scored)
        mask = tensors_of(batch)["response_mask"]
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        state.metrics["actor/entropy_loss"] = core_algos.agg_loss(entropys, mask, mode).item()
        state.metrics.update(add_rollout_correction(batch, self.config.algorithm.rollout_correction))

    def compute_ref_log_prob(self, state: StepState) -> None:
        """Log-probs of the sampled tokens under the frozen reference: with LoRA, the policy without its adapters."""
        reference: Any = self.worker_groups[self.reference_role]
        state.batch.union(self._on_workers(reference.compute_ref_log_prob, state.batch))

    def compute_values(self, state: StepState) -> None:
        """The critic's value of every response position, before the update."""
        critic: Any = self.worker_groups[CRITIC]
        state.batch.union(self._on_workers(critic.compute_values, state.batch))

    def compute_reward(self, state: StepState) -> None:
        """Episode reward at the last token of every row, as ``token_level_scores``."""
        reward = self.reward_fn(state.batch, return_dict=True)
        tensors_of(state.batch)["token_level_scores"] = reward["reward_tensor"]
        for name, values in reward.get("reward_extra_info", {}).items():
            state.batch.non_tensor_batch[name] = np.asarray(values)

    def compute_advantages(self, state: StepState) -> None:
        """Invalid-action penalty, KL in the reward, then the estimator, on real rows."""
        batch, algorithm, actor = state.batch, self.config.algorithm, self.config.actor_rollout_ref.actor
        valid = np.asarray(batch.non_tensor_batch["is_action_valid"], dtype=np.float64)
        state.metrics["episode/valid_action_ratio"] = float(valid.mean())
        if actor.use_invalid_action_penalty:
            state.metrics.update(apply_invalid_action_penalty(batch, actor.invalid_action_penalty_coef)[1])
        if algorithm.use_kl_in_reward:
            state.metrics.update(apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)[1])
        else:
            tensors = tensors_of(batch)
            tensors["token_level_rewards"] = tensors["token_level_scores"]
        compute_advantage(batch, algorithm.adv_estimator, algorithm, state.metrics)

    def prepare_update(self, state: StepState) -> None:
        """The rows that the updates see: resampled by reward where asked for, corrected for the engine's distribution,
        filled up to the number of ranks with rows that teach nothing, and put in an order that gives every rank a
        similar number of tokens."""
        algorithm = self.config.algorithm
        rows = state.batch
        if algorithm.use_pf_ppo:
            rng = np.random.default_rng([self.config.env.seed, state.step, PF_PPO_STREAM])
            method, power = algorithm.pf_ppo.reweight_method, algorithm.pf_ppo.weight_pow
            rows = core_algos.compute_pf_ppo_reweight_data(rows, method, power, rng)
        rows = correct_rows(rows)
        rows = rows.select(batch_keys=self._update_columns(), non_tensor_batch_keys=[], meta_info_keys=[])
        rows, added = batch_ops.pad_with_masked_rows(rows, self.world_size)
        state.metrics["training/padding_rows"] = added
        if self.config.trainer.balance_batch:
            state.metrics.update(batch_ops.balance_batch(rows, self.world_size))
        rows.meta_info = {
            "global_token_num": tensors_of(rows)["attention_mask"].sum(dim=-1).tolist(),
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }
        state.update_rows = rows

    def _update_columns(self) -> list[str]:
        columns = [*UPDATE_COLUMNS, *(CRITIC_COLUMNS if self.use_critic else ())]
        if self.config.actor_rollout_ref.actor.use_kl_loss:
            columns.append("ref_log_prob")
        return list(dict.fromkeys(columns))

    def update_critic(self, state: StepState) -> None:
        """Move the critic's values towards the returns."""
        critic: Any = self.worker_groups[CRITIC]
        result = critic.update_critic(state.rows_to_learn.select(batch_keys=CRITIC_COLUMNS))
        state.metrics.update(reduce_metrics(result.meta_info["metrics"]))

    def update_actor(self, state: StepState) -> None:
        """Update the policy."""
        columns = [name for name in self._update_columns() if name not in ("values", "returns")]
        result = self.actor_rollout_wg.update_actor(state.rows_to_learn.select(batch_keys=columns))
        state.metrics.update(reduce_metrics(result.meta_info["metrics"]))

    def end_epoch(self, state: StepState) -> None:
        """Count a pass over the prompts and tell the hooks."""
        self.epoch += 1
        for hook in self.hooks:
            hook.epoch_end(self._context(state), self.epoch)

    def validate(self, state: StepState) -> None:
        """Play the validation panel with the current weights."""
        with rollout_session(self.actor_rollout_wg, version=state.step + 1):
            result = self.validator.validate(self.val_envs, self.actor_rollout_wg, step=state.step)
        state.metrics.update(result.metrics)
        shown = self.config.trainer.log_val_generations
        if shown:
            state.generations = choose_samples(result.samples, shown)

    def dump_rollout(self, state: StepState) -> None:
        """Write the step's turns as text, and its whole episodes."""
        folder = Path(str(self.config.trainer.rollout_data_dir)).expanduser()
        write_turns(folder / f"{state.step}.jsonl", state.batch, self.tokenizer, state.step)
        if self.save_episodes is not None:
            self.save_episodes(folder / "trajectories" / f"step_{state.step}.jsonl", state.episodes)

    def _log_step(self, state: StepState, tracking: Tracking) -> None:
        state.timing["step"] = time.perf_counter() - state.started
        batch = state.batch
        epoch = (state.step - 1) // self.steps_per_epoch
        metrics = state.metrics | {"training/global_step": state.step, "training/epoch": epoch}
        metrics |= compute_data_metrics(batch, use_critic=self.use_critic)
        metrics |= compute_timing_metrics(batch, state.timing)
        metrics |= compute_throughput_metrics(batch, state.timing, self.world_size)
        tracking.log(metrics, step=state.step)
        tracking.log_generations(state.generations, step=state.step)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _context(self, state: StepState) -> TrainerContext:
        return TrainerContext(
            config=self.config,
            global_step=state.step,
            epoch=self.epoch,
            tokenizer=self.tokenizer,
            worker_groups=self.worker_groups,
            metrics=state.metrics,
            timer=state.timer,
            train_envs=self.train_envs,
            episodes=state.episodes,
        )

    def _hooks_after_rollout(self, state: StepState) -> None:
        for hook in self.hooks:
            hook.after_rollout(self._context(state), state.batch)

    def _hooks_after_log_prob(self, state: StepState) -> None:
        for hook in self.hooks:
            hook.after_log_prob(self._context(state), state.batch)

    def _hooks_after_reward(self, state: StepState) -> None:
        for hook in self.hooks:
            hook.after_reward(self._context(state), state.batch)

    def _hooks_after_advantage(self, state: StepState) -> None:
        for hook in self.hooks:
            hook.after_advantage(self._context(state), state.batch)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _on_workers(self, method: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        temperature = self.config.actor_rollout_ref.rollout.temperature
        return score_rows(method, batch, world_size=self.world_size, temperature=temperature)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, state: StepState, then: Callable[[], None] = lambda: None) -> None:
        """Write the whole run's state aside, call ``then`` (logging), give the folder its name.

        Logging comes before the rename: a step that a checkpoint covers is never missing from the metrics.
        """

        def write(folder: Path) -> None:
            with state.timer("save_checkpoint"):
                for role, part in self._saved_roles().items():
                    group: Any = self.worker_groups[role]
                    group.save_checkpoint(str(folder / part), state.step)
                save_hooks(self.hooks, folder)
            then()

        self.store.save(self._trainer_state(), write)

    def _saved_roles(self) -> dict[str, str]:
        """Roles with a state of their own -> folder in a checkpoint."""
        return {ACTOR_ROLLOUT: "actor", **({CRITIC: "critic"} if self.use_critic else {})}

    def _checkpoint_parts(self) -> dict[str, int | None]:
        """Folder in a checkpoint -> how many checkpoints keep it (None: all)."""
        trainer = self.config.trainer
        limits = {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}
        newest_only = trainer.remove_previous_ckpt_in_save
        return {part: 1 if newest_only else limits[part] for part in self._saved_roles().values()}

    def _trainer_state(self) -> TrainerState:
        return TrainerState(
            global_step=self.global_step,
            epoch=self.epoch,
            world_size=self.world_size,
            kl_controller=self.kl_ctrl.state_dict(),
            task_stream=dict(self.train_envs.state_dict()),
            hooks={hook.name: hook.state_dict() for hook in self.hooks},
        )

    def _resume(self) -> None:
        trainer = self.config.trainer
        folder = self.store.find(trainer.resume_mode, trainer.resume_from_path)
        if folder is None:
            logger.info("training starts from scratch, checkpoints go to %s", self.store.root)
            return
        state = load_state(folder)
        if state.world_size != self.world_size:
            raise UserError(
                f"{folder} was written by {state.world_size} ranks, this run has {self.world_size}; set "
                "trainer.nnodes and trainer.n_gpus_per_node as they were, or trainer.resume_mode=disable"
            )
        logger.info("resuming from %s (step %d, epoch %d)", folder, state.global_step, state.epoch)
        for role, part in self._saved_roles().items():
            if not (folder / part).is_dir():
                raise UserError(
                    f"{folder} holds no {part}: it was written with another algorithm.adv_estimator; set that one, or "
                    "trainer.resume_mode=disable"
                )
            group: Any = self.worker_groups[role]
            group.load_checkpoint(str(folder / part))
        self.train_envs.load_state_dict(state.task_stream)
        self.kl_ctrl.load_state_dict(state.kl_controller)
        self.global_step, self.epoch = state.global_step, state.epoch
        load_hooks(self.hooks, folder, state.hooks)
