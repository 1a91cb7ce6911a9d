# SPDX-License-Identifier: Apache-2.0
"""The trainer hook of TrajEvolve: score the steps of successes, shape rewards, keep the discriminator up to date."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agent_system.step_discriminator.discriminator import DiscriminatorConfig
from agent_system.step_discriminator.trajectory_analyzer import (
    CreditRecord,
    EnvAdapter,
    get_adapter,
    label_trajectories,
    require_adapter,
    revealing_steps,
)
from agent_system.trajectory import Trajectory, load_trajectories, save_trajectories
from recipe.traj_evolve.options import TrajEvolveConfig
from recipe.traj_evolve.shaping import EpisodeCredit, redundant_steps, scale_redundant_advantages, shaped_reward
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import ClassWithInitArgs
from verl.trainer.ppo.batch_ops import add_to_last_reward
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.dynamic_sampling import SHAPED_REWARDS
from verl.trainer.ppo.recipes import TrainerContext, TrainerHook
from verl.trainer.ppo.worker_groups import ACTOR_ROLLOUT, CRITIC
from verl.utils.errors import UserError
from verl.utils.fs import require_dir

if TYPE_CHECKING:
    from verl.trainer.config.schema import PPOConfig

__all__ = ["DISCRIMINATOR_ROLE", "TrajEvolveHook", "cut"]

logger = logging.getLogger(__name__)

DISCRIMINATOR_ROLE = "discriminator"
_PATH_KEY = "traj_evolve.discriminator_model_path"
_BUFFER_FILE = "buffer.jsonl"
_WEIGHTS_FOLDER = "discriminator"


def _options(config: PPOConfig) -> TrajEvolveConfig:
    options: TrajEvolveConfig = config.extra["traj_evolve"]
    return options


def check_discriminator_folder(path: str) -> None:
    """Refuse what is no discriminator's folder, without loading it. Raises UserError naming key and way out."""
    folder = require_dir(path, _PATH_KEY)
    try:
        DiscriminatorConfig.load(folder)
    except UserError as error:
        raise UserError(f"{_PATH_KEY}={path}: {error}") from error
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{_PATH_KEY}={path}: {folder / 'config.json'} does not exist, so there is no model; give the folder that "
            "stage 2 wrote"
        )


def cut(trajectory: Trajectory, num_steps: int) -> Trajectory:
    """The first `num_steps` steps of an episode, up to its first success."""
    if num_steps == len(trajectory.steps):
        return trajectory
    return replace(
        trajectory, steps=trajectory.steps[:num_steps], final_observation=trajectory.steps[num_steps].observation
    )


@dataclass
class _StepTally:
    """What was scored in one training step, over all its generation batches."""

    step: int
    scored: list[EpisodeCredit] = field(default_factory=list)
    changes: list[np.ndarray] = field(default_factory=list)
    """Shaped minus raw episode reward, one per episode."""

    def add(self, batch: DataProto, scored: Iterable[EpisodeCredit]) -> None:
        columns = batch.non_tensor_batch
        # One value per episode, not per turn.
        first = np.asarray(columns["step_index"], dtype=np.int64) == 0
        change = columns[SHAPED_REWARDS] - np.asarray(columns["episode_rewards"], dtype=np.float64)
        self.changes.append(change[first])
        self.scored += scored

    def metrics(self, threshold: float) -> dict[str, float]:
        """`redundancy_rate`: share of all scored steps called redundant, explorations included; `mean_rho`: mean over
        scored episodes of what the penalty uses; `shaped_minus_raw`: mean over all episodes of the step."""
        values = {
            "scored_trajectories": len(self.scored),
            "shaped_minus_raw": float(np.concatenate(self.changes).mean()),
        }
        if self.scored:
            called = [redundant_steps(verdict.credit, threshold) for verdict in self.scored]
            values["redundancy_rate"] = float(np.concatenate(called).mean())
            values["mean_rho"] = float(np.mean([verdict.rho for verdict in self.scored]))
            values["mean_credit"] = float(np.concatenate([verdict.credit for verdict in self.scored]).mean())
        return {f"traj_evolve/{key}": value for key, value in values.items()}


class TrajEvolveHook(TrainerHook):
    """Adds the columns `step_credit` (NaN where nothing was scored), `is_redundant_step` and `shaped_episode_rewards`.

    Rewards of the environment stay as they are. Credit comes from the discriminator or from exact replay; with the
    discriminator, every `evolve_freq` epochs the newest successes are labelled by replay and it is fine-tuned on them.
    """

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.options = _options(config)
        self.uses_discriminator = self.options.uses_discriminator
        self.buffer: deque[Trajectory] = deque(maxlen=self.options.buffer_size)
        """Successes since the last update, oldest first."""
        self.num_updates = 0
        self._tally = _StepTally(step=-1)
        self._adapter: EnvAdapter | None = None
        self._group: Any = None
        self._trained_groups: tuple[Any, ...] = ()
        """Of the models that the trainer updates: the policy and, where there is one, the critic."""

    @classmethod
    def is_enabled(cls, config: PPOConfig) -> bool:
        return _options(config).is_active

    @classmethod
    def check_config(cls, config: PPOConfig) -> None:
        options = _options(config)
        options.validate()
        # Both sources of credit replay episodes: the discriminator learns from replayed labels.
        require_adapter(config.env.env_name)
        if options.uses_discriminator:
            check_discriminator_folder(str(options.discriminator_model_path))

    def worker_roles(self, config: PPOConfig) -> dict[str, ClassWithInitArgs]:
        if not self.uses_discriminator:
            return {}
        from recipe.traj_evolve.discriminator_worker import DiscriminatorWorker

        policy = config.actor_rollout_ref
        return {
            DISCRIMINATOR_ROLE: ClassWithInitArgs(
                DiscriminatorWorker,
                self.options,
                device=config.trainer.device,
                strategy=policy.actor.strategy,
                fsdp_config=policy.actor.fsdp_config,
                gradient_checkpointing=policy.model.enable_gradient_checkpointing,
                trust_remote_code=policy.model.trust_remote_code,
            )
        }

    def init_workers(self, ctx: TrainerContext) -> None:
        self._adapter = get_adapter(ctx.train_envs.env_name, ctx.train_envs.data_dir)
        if self.uses_discriminator:
            groups = ctx.worker_groups
            self._trained_groups = tuple(groups[role] for role in (ACTOR_ROLLOUT, CRITIC) if role in groups)
            self._group = groups[DISCRIMINATOR_ROLE]
            self._group.init_model()

    # ---- one training step

    def after_rollout(self, ctx: TrainerContext, batch: DataProto) -> None:
        won: list[Trajectory] = [episode for episode in ctx.episodes if episode.success]
        with ctx.timer("score_credit"):
            scored = self._credit(ctx, won)
        self._add_columns(batch, scored)
        if self._tally.step != ctx.global_step:
            self._tally = _StepTally(ctx.global_step)
        self._tally.add(batch, scored.values())
        ctx.metrics.update(self._tally.metrics(self.options.step_credit_value))
        if self.uses_discriminator:
            self.buffer.extend(won)
            self._log_memory(ctx)

    def _credit(self, ctx: TrainerContext, won: Sequence[Trajectory]) -> dict[str, EpisodeCredit]:
        """Verdict on every success by `traj_uid`; one whose replay fails is left out and keeps its reward."""
        if not won:
            return {}
        if self.uses_discriminator:
            return {
                episode.traj_uid: self._verdict(credit, self._explored(episode))
                for episode, credit in zip(won, self._score(won), strict=True)
            }
        verdicts = {}
        for record in self._label(ctx, won):
            if record.status == "labelled":
                credit = np.array([step.credit for step in record.steps], dtype=np.float32)
                explored = np.array([step.redundancy_kind == "exploration" for step in record.steps], dtype=bool)
                verdicts[record.traj_uid] = self._verdict(credit, explored)
        return verdicts

    def _explored(self, episode: Trajectory) -> np.ndarray:
        """(T,) bool, the steps that would be of the kind exploration if they are redundant; from the record alone."""
        seen = [*(step.observation for step in episode.steps), episode.final_observation]
        # The state after the last step is not in the record; winning has changed it.
        keys = [*(step.state_key for step in episode.steps), ""]
        actions = [step.action for step in episode.steps]
        explored = np.zeros(len(actions), dtype=bool)
        explored[sorted(revealing_steps(actions, seen, keys, self.adapter.reveals))] = True
        return explored

    def _verdict(self, credit: np.ndarray, explored: np.ndarray) -> EpisodeCredit:
        threshold, count = self.options.step_credit_value, self.options.count_exploration
        return EpisodeCredit(credit, redundant_steps(credit, threshold, explored, count_exploration=count))

    @property
    def adapter(self) -> EnvAdapter:
        """How the environment's games are rebuilt; known once the workers are up."""
        if self._adapter is None:
            raise RuntimeError("init_workers has not been called")
        return self._adapter

    def _score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        column = np.empty(len(trajectories), dtype=object)
        column[:] = list(trajectories)
        data = DataProto.from_dict(tensors={}, non_tensors={"trajectory": column})
        padded, added = pad_dataproto_to_divisor(data, self._group.world_size)
        scored = unpad_dataproto(self._group.score(padded), added)
        return list(scored.non_tensor_batch["credit"])

    def _label(self, ctx: TrainerContext, trajectories: Sequence[Trajectory]) -> list[CreditRecord]:
        """Replayed labels; counts and time are logged."""
        with ctx.timer("replay"):
            records = label_trajectories(trajectories, self.adapter, options=self.options.credit_options)
        failed = [record for record in records if record.status != "labelled"]
        counts = {
            "replayed_trajectories": len(records),
            "unlabelled_trajectories": len(failed),
            "env_steps_replayed": sum(record.env_steps_used for record in records),
        }
        for name, count in counts.items():
            # A step may have several generation batches.
            ctx.metrics[f"traj_evolve/{name}"] = ctx.metrics.get(f"traj_evolve/{name}", 0) + count
        if failed:
            logger.warning(
                "step %d: %d of %d successes could not be labelled by replay; the first: %s",
                ctx.global_step, len(failed), len(records), failed[0].reason,
            )  # fmt: skip
        return records

    def _add_columns(self, batch: DataProto, scored: Mapping[str, EpisodeCredit]) -> None:
        columns = batch.non_tensor_batch
        size = len(columns["traj_uid"])
        credit = np.full(size, np.nan, dtype=np.float32)
        redundant = np.zeros(size, dtype=bool)
        shaped = np.array(columns["episode_rewards"], dtype=np.float64)
        for row, (uid, index) in enumerate(zip(columns["traj_uid"], columns["step_index"])):
            verdict = scored.get(uid)
            if verdict is None:
                continue
            credit[row] = verdict.credit_of(int(index))
            redundant[row] = verdict.is_redundant(int(index))
            shaped[row] = shaped_reward(shaped[row], verdict.rho, self.options.alpha, self.options.penalty)
        columns["step_credit"] = credit
        columns["is_redundant_step"] = redundant
        columns[SHAPED_REWARDS] = shaped

    def after_reward(self, ctx: TrainerContext, batch: DataProto) -> None:
        columns = batch.non_tensor_batch
        raw = np.asarray(columns["episode_rewards"], dtype=np.float64)
        change = torch.as_tensor(columns[SHAPED_REWARDS] - raw, dtype=torch.float32)
        scores = tensors_of(batch)["token_level_scores"].clone()
        last = tensors_of(batch)["response_mask"].sum(dim=-1) - 1
        rows = torch.nonzero((last >= 0) & (change != 0)).squeeze(-1)
        scores[rows, last[rows]] += change[rows].to(scores.dtype)
        tensors_of(batch)["token_level_scores"] = scores
        if "step_rewards" in tensors_of(batch):
            add_to_last_reward(batch, change, self.config.algorithm.gamma)

    def after_advantage(self, ctx: TrainerContext, batch: DataProto) -> None:
        if self.options.level != "step":
            return
        redundant = torch.as_tensor(batch.non_tensor_batch["is_redundant_step"])
        tensors = tensors_of(batch)
        tensors["advantages"] = scale_redundant_advantages(tensors["advantages"], redundant, self.options.alpha)

    def _log_memory(self, ctx: TrainerContext) -> None:
        """Used device memory by phase, the fullest rank; nothing on the CPU."""
        for rank in self._group.device_memory():
            for phase, used in rank.items():
                key = f"traj_evolve/device_memory_gb/{phase}"
                ctx.metrics[key] = max(used, ctx.metrics.get(key, 0.0))

    # ---- the discriminator's own training

    def epoch_end(self, ctx: TrainerContext, epoch: int) -> None:
        if not self.uses_discriminator or epoch % self.options.evolve_freq:
            return
        newest = list(self.buffer)[-self.options.max_replay_trajectories :][::-1]
        self.buffer.clear()
        if not newest:
            logger.info("epoch %d: no success since the last update, the discriminator stays as it is", epoch)
            return
        with ctx.timer("evolve_discriminator"):
            self._evolve(ctx, newest)
        self._log_memory(ctx)

    def _evolve(self, ctx: TrainerContext, trajectories: Sequence[Trajectory]) -> None:
        """Label by replay, measure agreement, fine-tune, measure again."""
        labelled, labels = [], []
        for trajectory, record in zip(trajectories, self._label(ctx, trajectories), strict=True):
            if record.status == "labelled":
                labelled.append(cut(trajectory, len(record.steps)))
                labels.append([step.credit for step in record.steps])
        if not labelled:
            logger.warning("none of %d successes could be labelled by replay: no update", len(trajectories))
            return
        before = self._agreement(self._score(labelled), labels)
        with self._others_in_host_memory():
            seed = (self.config.env.seed, self.num_updates)
            result: Mapping[str, float] = self._group.update(labelled, labels, seed)[0]
        self.num_updates += 1
        after = self._agreement(self._score(labelled), labels)
        ctx.metrics["traj_evolve/discriminator_agreement_before"] = before
        ctx.metrics["traj_evolve/discriminator_agreement_after"] = after
        ctx.metrics.update({f"traj_evolve/{key}": value for key, value in result.items()})

    @contextmanager
    def _others_in_host_memory(self) -> Iterator[None]:
        """The device holds no weight and no optimizer state of policy and critic inside the block."""
        with ExitStack() as restores:
            for group in self._trained_groups:
                group.release_device_memory()
                restores.callback(group.restore_device_memory)
            yield

    def _agreement(self, credits: Sequence[np.ndarray], labels: Sequence[Sequence[int]]) -> float:
        """Share of steps (last ones left out: necessary by construction) where the model's verdict is the label."""
        verdicts = [
            (np.asarray(credit[:-1]) >= self.options.step_credit_value) == (np.asarray(label[:-1]) == 1)
            for credit, label in zip(credits, labels, strict=True)
        ]
        joined = np.concatenate(verdicts)
        return float(joined.mean()) if joined.size else 1.0

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = int(state["num_updates"])

    def save(self, path: Path) -> None:
        if not self.uses_discriminator:
            return
        save_trajectories(path / _BUFFER_FILE, self.buffer)
        with self._others_in_host_memory():
            self._group.save_checkpoint(str(path / _WEIGHTS_FOLDER), self.num_updates)

    def load(self, path: Path) -> None:
        if not self.uses_discriminator:
            return
        if not (path / _BUFFER_FILE).is_file():
            raise UserError(
                f"{path} holds no discriminator: the checkpoint was written with another traj_evolve.credit_source; "
                "set that one, or trainer.resume_mode=disable"
            )
        loaded, report = load_trajectories(path / _BUFFER_FILE)
        if report.bad:
            raise UserError(
                f"the checkpoint is damaged: {report.messages()[0]}; choose another one with trainer.resume_from_path"
            )
        self.buffer.clear()
        self.buffer.extend(loaded)
        with self._others_in_host_memory():
            self._group.load_checkpoint(str(path / _WEIGHTS_FOLDER))
