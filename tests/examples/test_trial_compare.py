# SPDX-License-Identifier: Apache-2.0
"""The comparison of GRPO, TRIAL and its controls: what its runs share, its numbers, and the whole of it once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_system.trajectory import Trajectory
from examples.quickstart.profiles import PROFILES
from examples.quickstart.report import Evaluation
from examples.trial_trainer.compare import LOGGED, RUNS, Comparison, _run_numbers, _runs_table, difference

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PROFILES)
def test_the_runs_differ_in_the_dense_term_only(name: str, tmp_path: Path) -> None:
    profile = PROFILES[name]
    sizes = Comparison.sizes_for(profile, smoke=False)
    assert sizes.rl_steps == 20 and sizes.held_out * sizes.eval_samples >= 600
    phases = Comparison(tmp_path, profile, sizes, 0).phases()
    runs = [phase for phase in phases if phase.name in RUNS]
    assert [phase.name for phase in runs] == list(RUNS) and phases[-5].name == "sft"
    own = {f"trainer.default_local_dir={tmp_path / run}" for run in RUNS}
    own |= {f"trainer.experiment_name={run}" for run in RUNS} | {override for _, override in RUNS.values()}
    own |= {f"trainer.val_before_train={flag}" for flag in (True, False)}
    shared = [[text for text in phase.command if text not in own] for phase in runs]
    assert all(command == shared[0] for command in shared)
    assert Path(shared[0][1]).is_file() and f"actor_rollout_ref.model.path={phases[-5].done}" in shared[0]
    settings = [sorted(text for text in phase.command if text.startswith("trial.")) for phase in runs]
    assert len({tuple(setting) for setting in settings}) == len(RUNS)


def evaluation(name: str, won: list[bool], games: str = "aabb") -> Evaluation:
    episodes = [
        Trajectory(1, "t", "u", "alfworld", {"gamefile": game}, {}, success, 0.0, None, False, ())
        for game, success in zip(games, won, strict=True)
    ]
    return Evaluation(name, {}, episodes)


def test_the_difference_is_taken_task_by_task() -> None:
    base = evaluation("GRPO", [True, False, False, False])
    assert difference(base, base) == {"mean": 0.0, "low": 0.0, "high": 0.0}
    better = difference(base, evaluation("TRIAL", [True, True, True, False]))
    # Half an episode more in both games: redrawing games changes nothing.
    assert better == {"mean": 0.5, "low": 0.5, "high": 0.5}


def test_a_steps_time_is_without_validation_and_checkpoint() -> None:
    lines = [
        {
            "timing_s/step": 4.0, "timing_s/hindsight_log_prob": 1.0,
            "trial/gap_mean": 0.1, "trial/outcomes_shortened": 3.0,
        },
        {
            "timing_s/step": 36.0, "timing_s/testing": 30.0, "timing_s/save_checkpoint": 2.0,
            "timing_s/hindsight_log_prob": 1.0, "trial/gap_mean": 0.3, "trial/outcomes_shortened": 0.0,
        },
    ]  # fmt: skip
    numbers = _run_numbers(lines)
    assert numbers == pytest.approx(
        {"gap_mean": 0.2, "outcomes_shortened": 1.5, "seconds_per_step": 4.0, "pass_share_of_step": 0.25}
    )
    no_change = {"success_minus_grpo": {"mean": 0.0, "low": 0.0, "high": 0.0}}
    head, _, row = _runs_table({"trial": numbers | no_change}).splitlines()
    shown = dict(zip(head.split(" | ")[2:], row.removesuffix(" |").split(" | ")[2:], strict=True))
    assert [shown[name] for name in LOGGED] == ["0.200", "-", "-", "-", "-", "-", "1.500"]
    assert shown["s per step"] == "4.0" and shown["pass, % of step |"] == "25.0"


@pytest.mark.slow
def test_smoke_run_writes_the_tables(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.trial_trainer.compare", "--smoke", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| TRIAL |" in done.stdout and "pass, % of step" in done.stdout and "8 episodes each" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["policy"] for row in summary["policies"]] == ["SFT", "GRPO", "TRIAL", "uniform", "permuted"]
    runs = summary["runs"]
    # The first rollout is everybody's.
    gaps = {name: runs[name].get("gap_mean") for name in RUNS}
    assert gaps.pop("grpo") is None and len(set(gaps.values())) == 1
    assert runs["grpo"]["pass_share_of_step"] == 0.0 < runs["trial"]["pass_share_of_step"] < 1.0
