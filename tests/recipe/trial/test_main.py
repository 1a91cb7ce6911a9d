# SPDX-License-Identifier: Apache-2.0
"""The program from outside: help without torch, its YAML, and mistakes refused before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.trial.options import TrialConfig
from tests.recipe.traj_evolve.test_main import RUNS_HERE, start
from tests.recipe.trial.support import read_trial_config
from verl.trainer.config.schema import load_config
from verl.utils.errors import UserError


def program(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return start(cwd, sys.executable, "-m", "recipe.trial.main", *overrides)


def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['main', '--help']\n"
        "try:\n    runpy.run_module('recipe.trial.main', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "print('HEAVY', sorted(m for m in ('torch', 'ray', 'transformers', 'alfworld') if m in sys.modules))"
    )
    done = start(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert "allocation: relative" in done.stdout and "beta: 0.1" in done.stdout


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = program(tmp_path, "trial.alocation=uniform")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == "error: unknown config key trial.alocation; did you mean trial.allocation?"


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (["trial.allocation=random"], "trial.allocation.*relative.*uniform.*permuted"),
        (["trial.view=future"], "trial.view.*outcome.*identical"),
        (["trial.beta=-1"], "trial.beta=-1.*at least 0"),
        (["trial.c=0"], "trial.c=0.*above 0"),
        (["trial.beta=inf"], "trial.beta=inf must be finite"),
        (["trial.c=inf"], "trial.c=inf must be finite"),
        (["trial.max_outcome_length=0"], "trial.max_outcome_length=0.*at least 1"),
        (
            ["actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", "trial.max_outcome_length=20000"],
            "log_prob_max_token_len_per_gpu=16384 is below the 21024 tokens.*trial.max_outcome_length lower",
        ),
    ],
)
def test_what_cannot_work_is_refused(given: Sequence[str], pattern: str) -> None:
    with pytest.raises(UserError, match=pattern):
        read_trial_config([*RUNS_HERE, *given])


@pytest.mark.parametrize("off", ["trial.enable=False", "trial.view=identical"])
def test_without_outcomes_their_length_does_not_matter(off: str) -> None:
    long = ["actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", "trial.max_outcome_length=20000"]
    _, recipes = read_trial_config([*RUNS_HERE, *long, off])
    assert [recipe.name for recipe in recipes] == ["trial"]


def test_yaml_holds_every_key_with_its_default() -> None:
    """The defaults of the dataclass, and the method's."""
    cfg = load_config("trial_trainer", [], "recipe.trial.config")
    group = OmegaConf.to_container(cfg.trial)
    assert isinstance(group, dict) and group == asdict(TrialConfig())
    assert group["beta"] == 0.1 and group["c"] == 1.0 and not group["clamp_by_grpo"]
    assert cfg.algorithm.adv_estimator == "grpo"
