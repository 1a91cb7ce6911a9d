# SPDX-License-Identifier: Apache-2.0
"""The training program: one step is a list of named phases, each a method of :class:`RayPPOTrainer`.

The trainer knows neither environments nor credit methods: it is given a trajectory collector, a validator and hooks
(:mod:`verl.trainer.ppo.recipes`), and it drives worker groups through whatever controller made them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import WorkerGroup
from verl.trainer.ppo import batch_ops, core_algos
from verl.trainer.ppo.batch_ops import (
    apply_invalid_action_penalty,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.checkpointing import CheckpointStore, TrainerState, load_state
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_rollout_probs_diff,
    compute_throughput_metrics,
    compute_timing_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.recipes import TrainerContext, TrainerHook
from verl.trainer.ppo.worker_groups import ACTOR_ROLLOUT, REF, WorkerGroupFactory, core_roles, merge_roles
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write
from verl.utils.tracking import Tracking
from verl.workers.rollout.session import rollout_session

if TYPE_CHECKING:
    from verl.trainer.config.schema import PPOConfig

__all__ = [
    "RayPPOTrainer",
    "StepState",
    "apply_invalid_action_penalty",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_data_metrics",
    "compute_response_mask",
    "compute_timing_metrics",
]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses")
UPDATE_COLUMNS = (*MODEL_COLUMNS, "response_mask", "old_log_probs", "advantages")


class RolloutResult(Protocol):
    """One rollout: rows (one a turn), whole episodes, scalars to log."""

    @property
    def batch(self) -> DataProto: ...
    @property
    def episodes(self) -> Sequence[Any]: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...


class Collector(Protocol):
    """Plays episodes with the rollout engine (``agent_system.multi_turn_rollout.TrajectoryCollector``)."""

    def multi_turn_loop(
        self, envs: Any, actor_rollout_wg: Any, *, step: int, num_tasks: int, group_size: int
    ) -> RolloutResult: ...


class ValidationResult(Protocol):
    """Scalars named ``val/...``; the validator has written its own result files."""

    @property
    def metrics(self) -> Mapping[str, Any]: ...


class Validator(Protocol):
    """Plays the validation panel (``agent_system.multi_turn_rollout.validation.Validator``)."""

    def validate(self, envs: Any, actor_rollout_wg: Any, *, step: int) -> ValidationResult: ...


RewardFn = Callable[..., Any]
EpisodeWriter = Callable[[Path, Sequence[Any]], None]


@dataclass
class StepState:
    """What the phases of one step hand to each other. ``batch`` holds real rows only, in rollout order."""

    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    episodes: Sequence[Any] = ()
    rollout: DataProto | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def batch(self) -> DataProto:
        if self.rollout is None:
            raise RuntimeError("the rollout phase has not run yet")
        return self.rollout

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the block's wall time to ``timing_s/{name}``."""
        with _timer(name, self.timing):
            yield


@contextmanager
def _timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Phase:
    """A named part of the step. ``timed`` phases show up as ``timing_s/{name}``."""

    name: str
    run: Callable[[StepState], None]
    when: Callable[[int], bool]
    timed: bool = True


def check_algorithm(config: PPOConfig) -> None:
    """Refuse estimators and losses that are not registered, before a model is loaded.

    Raises:
        UserError: names the known ones.
    """
    estimator = core_algos.get_adv_estimator(config.algorithm.adv_estimator)
    if estimator.needs_critic:
        raise UserError(
            f"algorithm.adv_estimator={estimator.name} needs a value model, which this version does not train; "
            "set algorithm.adv_estimator=grpo"
        )
    core_algos.get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    core_algos.get_kl_controller(config.algorithm.kl_ctrl)


def with_total_steps(config: PPOConfig, total_steps: int) -> PPOConfig:
    """The config with the run's length written into the optimizer sections, where schedules read it."""
    actor_rollout_ref = config.actor_rollout_ref
    optim = replace(actor_rollout_ref.actor.optim, total_training_steps=total_steps)
    actor = replace(actor_rollout_ref.actor, optim=optim)
    return replace(config, actor_rollout_ref=replace(actor_rollout_ref, actor=actor))


class RayPPOTrainer:
    """Runs training steps, validation and checkpoints; :meth:`fit` is the program.

    Args:
        config: the validated config.
        tokenizer: of the policy; only used to write text.
        collector, validator, reward_fn: see the protocols above; ``reward_fn(batch, return_dict=True)`` returns
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
        self.config = with_total_steps(config, self.total_steps)
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
        keep = 1 if config.trainer.remove_previous_ckpt_in_save else config.trainer.max_actor_ckpt_to_keep
        self.store = CheckpointStore(config.trainer.default_local_dir, keep)
        self.worker_groups: dict[str, WorkerGroup] = {}
        self._make_worker_groups = make_worker_groups
        self._last_announced = time.monotonic()
        self.phases = self._list_phases()

    # -- start and end ------------------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Start the worker processes and build the models: reference, hooks' roles, actor with engine last."""
        core = core_roles(self.config, self.device)
        roles = merge_roles(core, *(hook.worker_roles(self.config) for hook in self.hooks))
        self.worker_groups = self._make_worker_groups(roles)
        if REF in core:
            logger.info("building the reference policy")
            self.worker_groups[REF].init_model()
        for hook in self.hooks:
            hook.init_workers(self._context(StepState(self.global_step)))
        logger.info("building the policy and its rollout engine")
        self.actor_rollout_wg.init_model()

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

        def after_warmup(step: int) -> bool:
            return self.config.trainer.critic_warmup <= step

        return [
            Phase("gen", self.collect_rollout, always),
            Phase("after_rollout", self._hooks_after_rollout, with_hooks),
            Phase("prepare", self.prepare_batch, always, timed=False),
            Phase("old_log_prob", self.compute_old_log_prob, always),
            Phase("ref", self.compute_ref_log_prob, with_reference),
            Phase("after_log_prob", self._hooks_after_log_prob, with_hooks),
            Phase("reward", self.compute_reward, always),
            Phase("after_reward", self._hooks_after_reward, with_hooks),
            Phase("adv", self.compute_advantages, always),
            Phase("after_advantage", self._hooks_after_advantage, with_hooks),
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
        """Play ``train_batch_size`` groups of episodes with one weight sync for all their turns."""
        with rollout_session(self.actor_rollout_wg, version=state.step):
            result = self.collector.multi_turn_loop(
                self.train_envs,
                self.actor_rollout_wg,
                step=state.step,
                num_tasks=self.config.data.train_batch_size,
                group_size=self.config.env.group_size,
            )
        state.rollout = result.batch
        state.episodes = result.episodes
        state.metrics.update(result.metrics)

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
        if "rollout_log_probs" in tensors_of(batch):
            state.metrics.update(compute_rollout_probs_diff(batch))

    def compute_ref_log_prob(self, state: StepState) -> None:
        """Log-probs of the sampled tokens under the frozen reference policy."""
        reference: Any = self.worker_groups[REF]
        state.batch.union(self._on_workers(reference.compute_ref_log_prob, state.batch))

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
        compute_advantage(batch, algorithm.adv_estimator, algorithm)

    def update_actor(self, state: StepState) -> None:
        """Fill up to the number of ranks with rows that teach nothing, balance tokens over ranks, update."""
        columns = [*UPDATE_COLUMNS, *(["ref_log_prob"] if self.config.actor_rollout_ref.actor.use_kl_loss else [])]
        rows = state.batch.select(batch_keys=columns, non_tensor_batch_keys=[], meta_info_keys=[])
        rows, added = batch_ops.pad_with_masked_rows(rows, self.world_size)
        state.metrics["training/padding_rows"] = added
        if self.config.trainer.balance_batch:
            state.metrics.update(batch_ops.balance_batch(rows, self.world_size))
        rows.meta_info = {
            "global_token_num": tensors_of(rows)["attention_mask"].sum(dim=-1).tolist(),
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }
        result = self.actor_rollout_wg.update_actor(rows)
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

    def dump_rollout(self, state: StepState) -> None:
        """Write the step's turns as text, and its whole episodes."""
        folder = Path(str(self.config.trainer.rollout_data_dir)).expanduser()
        tensors = tensors_of(state.batch)
        inputs = self.tokenizer.batch_decode(tensors["prompts"], skip_special_tokens=True)
        outputs = self.tokenizer.batch_decode(tensors["responses"], skip_special_tokens=True)
        scores = tensors["token_level_scores"].sum(dim=-1).tolist()
        lines = [
            json.dumps({"input": given, "output": said, "score": score, "step": state.step}, ensure_ascii=False)
            for given, said, score in zip(inputs, outputs, scores, strict=True)
        ]
        atomic_write(folder / f"{state.step}.jsonl", "\n".join(lines) + "\n")
        if self.save_episodes is not None:
            self.save_episodes(folder / "trajectories" / f"step_{state.step}.jsonl", state.episodes)

    def _log_step(self, state: StepState, tracking: Tracking) -> None:
        state.timing["step"] = time.perf_counter() - state.started
        batch = state.batch
        epoch = (state.step - 1) // self.steps_per_epoch
        metrics = state.metrics | {"training/global_step": state.step, "training/epoch": epoch}
        metrics |= compute_data_metrics(batch)
        metrics |= compute_timing_metrics(batch, state.timing)
        metrics |= compute_throughput_metrics(batch, state.timing, self.world_size)
        tracking.log(metrics, step=state.step)

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
        """Score all rows on the ranks, in equal shares; results in row order, without the rows added for that."""
        rows = batch.select(batch_keys=list(MODEL_COLUMNS), non_tensor_batch_keys=[], meta_info_keys=[])
        rows.meta_info = {"temperature": self.config.actor_rollout_ref.rollout.temperature}
        padded, added = pad_dataproto_to_divisor(rows, self.world_size)
        result = unpad_dataproto(method(padded), added)
        result.meta_info = {}
        return result

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, state: StepState, then: Callable[[], None] = lambda: None) -> None:
        """Write the whole run's state aside, call ``then`` (logging), give the folder its name.

        Logging comes before the rename: a step that a checkpoint covers is never missing from the metrics.
        """

        def write(folder: Path) -> None:
            with state.timer("save_checkpoint"):
                self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), state.step)
                for hook in self.hooks:
                    hook_folder = folder / "hooks" / hook.name
                    hook_folder.mkdir(parents=True)
                    hook.save(hook_folder)
            then()

        self.store.save(self._trainer_state(), write)

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
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"))
        self.train_envs.load_state_dict(state.task_stream)
        self.kl_ctrl.load_state_dict(state.kl_controller)
        self.global_step, self.epoch = state.global_step, state.epoch
        self._load_hooks(folder, state.hooks)

    def _load_hooks(self, folder: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
        for hook in self.hooks:
            if hook.name in states:
                hook.load_state_dict(states[hook.name])
                hook.load(folder / "hooks" / hook.name)
            else:
                logger.warning("%s holds no state of recipe %s, which starts afresh", folder, hook.name)
        for name in sorted(set(states) - {hook.name for hook in self.hooks}):
            logger.warning("%s holds state of recipe %s, which is not enabled in this run", folder, name)
