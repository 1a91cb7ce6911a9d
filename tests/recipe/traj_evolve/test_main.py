# SPDX-License-Identifier: Apache-2.0
"""The program from outside: help without torch, and mistakes answered in one line before a model is loaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe.traj_evolve.options import TrajEvolveConfig
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import read_config

ROOT = Path(__file__).resolve().parents[3]
RUNS_HERE = (
    "actor_rollout_ref.model.path=nowhere", "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)  # fmt: skip


def start(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def program(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return start(cwd, sys.executable, "-m", "recipe.traj_evolve.main", *overrides)


# One interpreter for many command lines: the program is run as `python -m` runs it, again and again.
SEVERAL = """
import contextlib, io, json, runpy, sys
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["main", *arguments]
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            runpy.run_module("recipe.traj_evolve.main", run_name="__main__", alter_sys=False)
        status = 0
    except SystemExit as end:
        status = end.code
    results[name] = [status, error.getvalue()]
results["modules"] = sorted(name for name in ("ray",) if name in sys.modules)
print("RESULT" + json.dumps(results))
"""


def programs(cwd: Path, command_lines: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    lines = {name: [*RUNS_HERE, *given] for name, given in command_lines.items()}
    done = start(cwd, sys.executable, "-c", SEVERAL, json.dumps(lines))
    assert "RESULT" in done.stdout, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT")[2])
    return results


def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['main', '--help']\n"
        "try:\n    runpy.run_module('recipe.traj_evolve.main', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "print('HEAVY', sorted(m for m in ('torch', 'ray', 'transformers', 'alfworld') if m in sys.modules))"
    )
    done = start(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert "discriminator_model_path" in done.stdout and "alpha: 1.0" in done.stdout


def test_unknown_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    done = program(tmp_path, "traj_evolve.alhpa=1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == "error: unknown config key traj_evolve.alhpa; did you mean traj_evolve.alpha?"


def test_missing_discriminator_is_one_line(tmp_path: Path) -> None:
    done = program(tmp_path, *RUNS_HERE, f"traj_evolve.discriminator_model_path={tmp_path}/gone")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert line.startswith("error: traj_evolve.discriminator_model_path=") and "does not exist" in line
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_refused_before_a_model_is_loaded(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path
) -> None:
    def path(folder: Path) -> str:
        return f"traj_evolve.discriminator_model_path={folder}"

    headless = tmp_path / "headless"
    headless.mkdir()
    (headless / "discriminator.json").write_bytes((discriminator_dir / "discriminator.json").read_bytes())
    old = tmp_path / "old"
    old.mkdir()
    record = json.loads((discriminator_dir / "discriminator.json").read_text())
    (old / "discriminator.json").write_text(json.dumps(record | {"template_version": 0}))
    replay = "traj_evolve.credit_source=replay"
    cases = {
        "no path": ([], "needs traj_evolve.discriminator_model_path"),
        "no folder": ([path(tmp_path / "gone")], "discriminator_model_path=.*gone.*does not exist"),
        "no discriminator": ([path(tiny_model_dir)], "discriminator_model_path=.*discriminator.json.*stage 2"),
        "no model": ([path(headless)], "discriminator_model_path=.*config.json does not exist"),
        "old template": ([path(old)], "discriminator_model_path=.*template 0.*train it again"),
        "no such estimator": ([replay, "algorithm.adv_estimator=gigpooo"], "adv_estimator='gigpooo'"),
        "no adapter": ([replay, "env.env_name=search"], "env_name=search.*credit analysis knows alfworld"),
        "choice": ([replay, "traj_evolve.penalty=quadratic"], "traj_evolve.penalty.*relative.*absolute"),
        "range": ([replay, "traj_evolve.alpha=-1"], "traj_evolve.alpha=-1.*at least 0"),
        "frequency": ([replay, "traj_evolve.evolve_freq=0"], "traj_evolve.evolve_freq=0.*at least 1"),
        "type": ([replay, "traj_evolve.count_exploration=perhaps"], "traj_evolve.count_exploration"),
    }
    before = sorted(tmp_path.iterdir())
    results = programs(tmp_path, {name: given for name, (given, _) in cases.items()})
    assert results.pop("modules") == []
    for name, (_, pattern) in cases.items():
        status, text = results[name]
        assert status == 2, (name, text)
        (line,) = text.splitlines()
        assert re.match(f"error: .*{pattern}", line), (name, line)
    assert sorted(tmp_path.iterdir()) == before


def test_switched_off_nothing_of_it_is_checked() -> None:
    cfg = load_config("traj_evolve_trainer", [*RUNS_HERE, "traj_evolve.enable=False"], "recipe.traj_evolve.config")
    config, recipes = read_config(cfg, ("recipe.traj_evolve",))
    assert [recipe.name for recipe in recipes] == ["traj_evolve"] and not config.extra["traj_evolve"].is_active


def test_yaml_holds_every_key_with_its_default() -> None:
    """The defaults of the dataclass, and the published values."""
    cfg = load_config("traj_evolve_trainer", [], "recipe.traj_evolve.config")
    group = OmegaConf.to_container(cfg.traj_evolve)
    assert group == asdict(TrajEvolveConfig())
    published = {"alpha": 1.0, "evolve_freq": 5, "discriminator_lr": 1e-5, "discriminator_epochs": 1}
    assert published.items() <= group.items() and group["step_credit_value"] == 0.5
    assert cfg.algorithm.norm_adv_by_std_in_grpo and cfg.algorithm.compute_mean_std_cross_steps
    assert cfg.algorithm.adv_estimator == "grpo"
