# SPDX-License-Identifier: Apache-2.0
"""Validation: each task exactly once, whatever the batch size; files; intervals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from agent_system.multi_turn_rollout import TrajectoryCollector, ValidationResult, Validator
from agent_system.multi_turn_rollout.statistics import bootstrap_mean, wilson_interval
from agent_system.multi_turn_rollout.validation import panel_tasks
from agent_system.trajectory import load_trajectories
from tests.helpers.fake_actor import FakeActorGroup, choose_command
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import COLOURS, toy_manager
from verl.utils.errors import UserError

PANEL = [{"name": f"toy-{COLOURS[i % 3]}", "task_type": COLOURS[i % 3], "number": i} for i in range(7)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tiny_tokenizer()


def run(tokenizer: Any, folder: Path, slots: int, step: int = 4, **changes: Any) -> ValidationResult:
    config = rollout_config(local_dir=str(folder), max_steps=5, val_sample=True, **changes)
    validator = Validator(config, TrajectoryCollector(config, tokenizer))
    actor = FakeActorGroup(tokenizer, choose_command, world_size=2)
    result = validator.validate(toy_manager(slots, tasks=PANEL), actor, step=step)
    meta = actor.requests[0].meta_info
    expected = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "validate": True}
    assert {key: meta[key] for key in expected} == expected
    return result


def outcome(result: ValidationResult) -> list[Any]:
    return [(episode.task, episode.success, episode.steps) for episode in result.episodes]


@pytest.mark.parametrize("slots", [1, 3, 7, 20])
def test_each_task_once_whatever_the_batch(tokenizer: Any, tmp_path: Path, slots: int) -> None:
    result = run(tokenizer, tmp_path, slots)
    assert sorted(episode.task["number"] for episode in result.episodes) == list(range(7))
    reference = run(tokenizer, tmp_path / "r", 7)
    assert outcome(result) == outcome(reference)
    assert result.metrics == reference.metrics and result.record == reference.record


def test_n_members_per_task_differ(tokenizer: Any, tmp_path: Path) -> None:
    result = run(tokenizer, tmp_path, 4, val_n=5)
    numbers = [episode.task["number"] for episode in result.episodes]
    assert [numbers.count(i) for i in range(7)] == [5] * 7
    assert len({episode.traj_uid for episode in result.episodes}) == 35
    assert result.episodes[0].traj_uid == "v4-g0-m0"
    first = [tuple(step.response for step in episode.steps) for episode in result.episodes[:5]]
    assert len(set(first)) > 1
    assert result.record["n"] == 5 and result.record["num_episodes"] == 35


def test_the_step_that_asks_does_not_matter(tokenizer: Any, tmp_path: Path) -> None:
    assert outcome(run(tokenizer, tmp_path, 3, step=1)) == outcome(run(tokenizer, tmp_path, 3, step=9))


def test_files_and_metrics(tokenizer: Any, tmp_path: Path) -> None:
    result = run(tokenizer, tmp_path, 3, val_n=2)
    folder = tmp_path / "validation"
    assert sorted(path.name for path in folder.iterdir()) == ["step_4.json", "step_4.trajectories.jsonl"]
    record = json.loads((folder / "step_4.json").read_text())
    assert record == result.record
    episodes, report = load_trajectories(folder / "step_4.trajectories.jsonl")
    assert episodes == result.episodes and not report.bad
    won = [episode.success for episode in episodes]
    assert 0 < sum(won) < len(won)
    success = np.mean(won)
    assert record["success"]["mean"] == pytest.approx(success) == result.metrics["val/success_rate"]
    low, high = record["success"]["bootstrap95"]
    assert 0 <= low <= success <= high <= 1
    assert result.metrics["val/text/test_score"] == pytest.approx(10 * success)
    steps = [len(episode.steps) for episode in episodes if episode.success]
    assert result.metrics["val/steps_per_success"] == pytest.approx(np.mean(steps))
    assert set(record["success_by_task_type"]) == set(COLOURS)
    assert sum(part["num_episodes"] for part in record["success_by_task_type"].values()) == 14
    for key in ("split", "panel_hash", "split_hash", "seed", "sampling", "step", "versions", "num_tasks"):
        assert record[key] not in (None, "")


def test_placeholder_rows_limit_the_panel(tokenizer: Any, tmp_path: Path) -> None:
    files = tmp_path / "val.parquet"
    pd.DataFrame({"prompt": ["x"] * 3}).to_parquet(files)
    result = run(tokenizer, tmp_path, 2, val_files=str(files))
    assert [episode.task["number"] for episode in result.episodes] == [0, 2, 4]
    assert result.record["panel_hash"] != run(tokenizer, tmp_path, 2).record["panel_hash"]
    with pytest.raises(UserError, match=r"data.val_files=.*nothere.*val_files=null"):
        run(tokenizer, tmp_path, 2, val_files=str(tmp_path / "nothere.parquet"))


def test_panel_tasks_spreads() -> None:
    tasks = [{"i": i} for i in range(10)]
    assert [task["i"] for task in panel_tasks(tasks, 4)] == [0, 2, 5, 7]
    assert panel_tasks(tasks, None) == panel_tasks(tasks, 99) == tasks


def test_intervals() -> None:
    assert wilson_interval(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    groups = [f"g{i // 4}" for i in range(40)]
    values = [float(i // 4 < 5) for i in range(40)]
    low, high = bootstrap_mean(values, groups)
    assert (low, high) == bootstrap_mean(values, groups)
    narrow = bootstrap_mean(values, [str(i) for i in range(40)])
    assert low < narrow[0] < 0.5 < narrow[1] < high, "episodes of one task count together"
