# SPDX-License-Identifier: Apache-2.0
"""Trajectory files: round trip, and broken lines named with line and field."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_system.trajectory import (
    SCHEMA_VERSION,
    Step,
    Trajectory,
    append_trajectories,
    load_trajectories,
    save_trajectories,
    task_key,
)
from verl.utils.errors import UserError


def episode(uid: str = "s1-g0-m0") -> Trajectory:
    steps = tuple(
        Step(
            step_index=i,
            observation=f"You see\n a mug {i}. \u2028 \u6211 \U0001f600 \ud83d",
            admissible_actions=("look", "go to shelf 1"),
            response=None if i == 0 else "<action>look</action>",
            action="look",
            is_action_valid=i > 0,
            reward=0.0,
            done=False,
            state_key="ab",
            expert_kind="detour" if i == 0 else None,
        )
        for i in range(3)
    )
    task = {"gamefile": "train/a/game.tw-pddl", "sha256": "00", "instruction": "put it", "task_type": "x"}
    return Trajectory(
        schema_version=SCHEMA_VERSION,
        traj_uid=uid,
        uid="s1-g0",
        env_name="alfworld",
        task=task,
        policy={"kind": "expert", "seed": 3},
        success=False,
        episode_reward=0.0,
        task_score=None,
        truncated=True,
        steps=steps,
        final_observation="end",
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.jsonl"
    episodes = [episode("a"), replace(episode("b"), success=True, episode_reward=10.0, task_score=1.0)]
    save_trajectories(path, episodes)
    loaded, report = load_trajectories(path)
    assert loaded == episodes
    assert (report.num_loaded, report.bad) == (2, [])
    first = path.read_bytes()
    save_trajectories(path, loaded)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == ["t.jsonl"]


def broken(change: dict[str, Any], step_change: dict[str, Any] | None = None) -> str:
    record = episode().to_dict() | change
    if step_change is not None:
        record["steps"] = [dict(step) for step in record["steps"]]
        record["steps"][1] |= step_change
    return json.dumps(record)


def without(field: str) -> str:
    record = episode().to_dict()
    del record[field]
    return json.dumps(record)


@pytest.mark.parametrize(
    ("line", "field", "reason"),
    [
        ("{half a line", "", "not valid JSON"),
        ("[1, 2]", "", "not a JSON object"),
        (broken({"schema_version": 99}), "schema_version", "is 99"),
        (without("task"), "task", "is missing"),
        (without("task_score"), "task_score", "is missing"),
        (broken({"success": 1}), "success", "true or false"),
        (broken({"episode_reward": "10"}), "episode_reward", "a number"),
        (broken({"extra": 1}), "extra", "not a known field"),
        (broken({}, {"reward": None}), "steps[1].reward", "a number"),
        (broken({}, {"reward": True}), "steps[1].reward", "a number"),
        (broken({}, {"step_index": 7}), "steps[1].step_index", "expected 1"),
        (broken({}, {"admissible_actions": ["look", 3]}), "steps[1].admissible_actions[1]", "a string"),
        (broken({}, {"credits": 1}), "steps[1].credits", "not a known field"),
        (broken({"episode_reward": 7.5}).replace("7.5", "NaN"), "", "NaN"),
        (broken({"episode_reward": 7.5}).replace("7.5", "1e999"), "episode_reward", "finite"),
        (broken({"episode_reward": 7.5}).replace("7.5", "1" + "0" * 400), "episode_reward", "finite"),
        (broken({"episode_reward": 7.5}).replace("7.5", "1" * 9000), "", "not valid JSON"),
        (broken({"steps": {"a": 1}}), "steps", "a list"),
        (broken({"steps": [None]}), "steps[0]", "an object"),
    ],
)
def test_broken_line_is_named_and_the_others_kept(tmp_path: Path, line: str, field: str, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    good = episode().to_line()
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    loaded, report = load_trajectories(path)
    assert len(loaded) == report.num_loaded == 2
    [(number, name, why)] = report.bad
    assert (number, name) == (3, field) and reason in why
    assert f"{path}, line 3" in report.messages()[0] and field in report.messages()[0]


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe\n" + episode().to_line().encode() + b"\n")
    loaded, report = load_trajectories(path)
    assert len(loaded) == 1 and "UTF-8" in report.bad[0].reason


def test_append_after_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    append_trajectories(path, [episode("a")])
    with path.open("a") as handle:
        handle.write('{"schema_version": 1, "traj')
    append_trajectories(path, [episode("b"), episode("c")])
    loaded, report = load_trajectories(path)
    assert [e.traj_uid for e in loaded] == ["a", "b", "c"]
    assert [bad.line for bad in report.bad] == [2]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl"):
        load_trajectories(tmp_path / "none.jsonl")


def test_task_key_ignores_key_order_only() -> None:
    assert task_key({"a": 1, "b": "x"}) == task_key({"b": "x", "a": 1}) != task_key({"a": 2, "b": "x"})
