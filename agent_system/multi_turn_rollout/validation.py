# SPDX-License-Identifier: Apache-2.0
"""Validator: plays every task of a fixed panel exactly once (times `val_kwargs.n`) and says how sure the result is."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agent_system.environments.base import EnvironmentManagerBase
from agent_system.multi_turn_rollout.episode_buffer import DATA_SOURCE
from agent_system.multi_turn_rollout.rollout_loop import ActorRolloutGroup, TrajectoryCollector
from agent_system.multi_turn_rollout.seats import make_seats
from agent_system.multi_turn_rollout.statistics import bootstrap_mean, wilson_interval
from agent_system.trajectory import Trajectory, save_trajectories, task_key
from verl.utils.dataset.parquet import count_rows
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

__all__ = ["ValidationResult", "Validator", "panel_tasks", "success_by_task_type", "success_summary"]

logger = logging.getLogger(__name__)

RESULT_VERSION = 1
_PACKAGES = ("trajevolve", "torch", "transformers", "alfworld", "vllm")


class _DataSection(Protocol):
    @property
    def val_files(self) -> str | Sequence[str] | None: ...


class _TrainerSection(Protocol):
    @property
    def default_local_dir(self) -> str: ...


class ValidatorConfig(Protocol):
    """What the validator reads of the configuration, besides what the collector reads."""

    @property
    def data(self) -> _DataSection: ...
    @property
    def trainer(self) -> _TrainerSection: ...


@dataclass(frozen=True)
class ValidationResult:
    """One evaluation of the panel."""

    metrics: dict[str, float]
    """`val/...`, one value per trajectory in every mean."""
    record: dict[str, Any]
    """JSON types: what was played how, success with intervals, per task type, per episode."""
    episodes: list[Trajectory]

    @property
    def samples(self) -> list[tuple[str, str, float]]:
        """Per episode: what the environment said first, everything the policy said, the episode's reward."""
        return [
            (
                episode.steps[0].observation,
                "\n".join(step.response or "" for step in episode.steps),
                episode.episode_reward,
            )
            for episode in self.episodes
        ]


def panel_tasks(tasks: Sequence[Mapping[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    """All tasks, or `limit` of them at equal distances (a sorted list keeps its mix of task types)."""
    if limit is None or limit >= len(tasks):
        return [dict(task) for task in tasks]
    return [dict(tasks[i * len(tasks) // limit]) for i in range(limit)]


def _panel_limit(files: str | Sequence[str] | None) -> int | None:
    """Number of rows of the parquet files of `data.val_files`; None without files."""
    if not files:
        return None
    rows = count_rows(files, "data.val_files")
    if rows == 0:
        raise UserError(f"data.val_files={files}: no rows; set data.val_files=null or a file with rows.")
    return rows


class Validator:
    """Plays the validation panel through the same collector as training, with `val_kwargs` sampling.

    Results do not depend on the number of slots, environment actors or ranks, nor on the training step that asks.
    """

    def __init__(
        self, config: ValidatorConfig, collector: TrajectoryCollector, *, output_dir: str | Path | None = None
    ) -> None:
        """
        Args:
            config: `data.val_files` limits the number of tasks when set.
            collector: plays the episodes.
            output_dir: where `step_N.json` and `step_N.trajectories.jsonl` go; None =
                `{trainer.default_local_dir}/validation`.
        """
        self._collector = collector
        self._limit = _panel_limit(config.data.val_files)
        local_dir = Path(config.trainer.default_local_dir).expanduser()
        self.output_dir = Path(output_dir) if output_dir is not None else local_dir / "validation"

    def validate(
        self, envs: EnvironmentManagerBase, actor_rollout_wg: ActorRolloutGroup, *, step: int
    ) -> ValidationResult:
        """Play the panel, write both files, return metrics, record and episodes.

        Raises:
            UserError: the environment has no tasks.
        """
        tasks = panel_tasks(envs.tasks, self._limit)
        if not tasks:
            raise UserError(f"the {envs.env_name} environment has no validation tasks")
        logger.info(
            "validation at step %d: %d tasks of %s, panel hash %s", step, len(tasks), envs.split, _panel_hash(tasks)
        )
        settings = self._collector.settings
        seats = make_seats(tasks, settings.val_n, f"v{step}")
        episodes: list[Trajectory] = []
        success: dict[str, list[np.ndarray]] = defaultdict(list)
        tools: list[float] = []
        for start in range(0, len(seats), envs.num_slots):
            chunk = seats[start : start + envs.num_slots]
            played = self._collector.play(envs, actor_rollout_wg, chunk, step=step, validate=True, keep_rows=False)
            episodes += played.episodes
            tools += played.buffer.tool_callings.tolist()
            for key, values in played.success.items():
                success[key].append(values)
            logger.info("validation at step %d: %d of %d episodes", step, len(episodes), len(seats))
        merged = {key: np.concatenate(parts) for key, parts in success.items()}
        metrics = self._metrics(episodes, merged, tools)
        record = self._record(envs, tasks, episodes, merged, step)
        self._write(step, record, episodes)
        return ValidationResult(metrics, record, episodes)

    @staticmethod
    def _metrics(
        episodes: Sequence[Trajectory], success: Mapping[str, np.ndarray], tools: Sequence[float]
    ) -> dict[str, float]:
        lengths = np.asarray([len(episode.steps) for episode in episodes], dtype=np.float64)
        won = np.asarray([episode.success for episode in episodes])
        valid = [step.is_action_valid for episode in episodes for step in episode.steps]
        low, high = bootstrap_mean(won.astype(float).tolist(), [task_key(episode.task) for episode in episodes])
        metrics = {
            f"val/{DATA_SOURCE}/test_score": float(np.mean([episode.episode_reward for episode in episodes])),
            f"val/{DATA_SOURCE}/tool_call_count/mean": float(np.mean(tools)),
            "val/episode_length/mean": float(lengths.mean()),
            "val/valid_action_ratio": float(np.mean(valid)),
            "val/truncated_ratio": float(np.mean([episode.truncated for episode in episodes])),
            "val/success_ci95/low": low,
            "val/success_ci95/high": high,
        }
        if won.any():
            metrics["val/steps_per_success"] = float(lengths[won].mean())
        return metrics | {f"val/{key}": float(values.mean()) for key, values in success.items()}

    def _record(
        self,
        envs: EnvironmentManagerBase,
        tasks: Sequence[dict[str, Any]],
        episodes: Sequence[Trajectory],
        success: Mapping[str, np.ndarray],
        step: int,
    ) -> dict[str, Any]:
        settings = self._collector.settings
        return {
            "schema_version": RESULT_VERSION,
            "step": step,
            "env_name": envs.env_name,
            "environment": envs.metadata,
            "split": envs.split,
            "split_hash": envs.panel_hash,
            "panel_hash": _panel_hash(tasks),
            "num_tasks": len(tasks),
            "n": settings.val_n,
            "num_episodes": len(episodes),
            "max_steps": settings.max_steps,
            "seed": settings.seed,
            "sampling": settings.val_sampling.as_dict(),
            "model": settings.model,
            "versions": _versions(),
            "success": success_summary(episodes),
            "success_by_task_type": success_by_task_type(episodes),
            "success_keys": {key: float(values.mean()) for key, values in sorted(success.items())},
            "episodes": [_episode_line(episode) for episode in episodes],
        }

    def _write(self, step: int, record: Mapping[str, Any], episodes: Sequence[Trajectory]) -> None:
        save_trajectories(self.output_dir / f"step_{step}.trajectories.jsonl", episodes)
        atomic_write(self.output_dir / f"step_{step}.json", json.dumps(record, indent=1, allow_nan=False) + "\n")


def _panel_hash(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Names the tasks that were played, with their contents, in their order."""
    return task_key({"tasks": [task_key(task) for task in tasks]})


def success_summary(episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """Success of some episodes: mean, both 95 % intervals (bootstrap over tasks; Wilson over episodes), lengths.

    JSON types; at least one episode.
    """
    won = [float(episode.success) for episode in episodes]
    lengths = [len(episode.steps) for episode in episodes if episode.success]
    return {
        "mean": float(np.mean(won)),
        "num_episodes": len(won),
        "bootstrap95": list(bootstrap_mean(won, [task_key(episode.task) for episode in episodes])),
        "wilson95": list(wilson_interval(sum(won), len(won))),
        "mean_steps": float(np.mean([len(episode.steps) for episode in episodes])),
        "steps_per_success": float(np.mean(lengths)) if lengths else None,
    }


def success_by_task_type(episodes: Sequence[Trajectory]) -> dict[str, dict[str, Any]]:
    """`success_summary` of every task type, sorted by its name."""
    by_type: dict[str, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        by_type[str(episode.task.get("task_type", ""))].append(episode)
    return {name: success_summary(by_type[name]) for name in sorted(by_type)}


def _episode_line(episode: Trajectory) -> dict[str, Any]:
    return {
        "traj_uid": episode.traj_uid,
        "task": episode.task,
        "success": episode.success,
        "episode_reward": episode.episode_reward,
        "task_score": episode.task_score,
        "num_steps": len(episode.steps),
        "truncated": episode.truncated,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            logger.debug("%s is not installed", name)
    return found
