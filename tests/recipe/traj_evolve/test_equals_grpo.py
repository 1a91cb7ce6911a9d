# SPDX-License-Identifier: Apache-2.0
"""Switched off, or with weight 0, the recipe is GRPO to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipe.traj_evolve.support import policy_weights, run_evolve, same, without_clocks
from tests.verl.trainer.toy_run import run_toy, toy_config

Run = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]
STEPS = "trainer.total_epochs=2"
REPLAY = "traj_evolve.credit_source=replay"


@pytest.fixture(scope="module")
def grpo(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of the core's own program."""
    trainer, lines = run_toy(toy_config(tiny_model_dir, tmp_path_factory.mktemp("grpo"), STEPS))
    return without_clocks(lines), policy_weights(trainer)


@pytest.mark.parametrize(
    "overrides",
    [
        ("traj_evolve.enable=False",),
        ("traj_evolve.credit_source=none",),
        (REPLAY, "traj_evolve.alpha=0"),
        (REPLAY, "traj_evolve.alpha=0", "traj_evolve.penalty=absolute", "traj_evolve.level=step"),
    ],
    ids=["off", "no_credit", "alpha_0", "alpha_0_absolute_step"],
)
def test_bit_equal_to_grpo(grpo: Run, tiny_model_dir: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    trainer, lines = run_evolve(tiny_model_dir, tmp_path, STEPS, *overrides)
    assert without_clocks(lines, "traj_evolve/") == grpo[0]
    assert same(policy_weights(trainer), grpo[1])
    # With weight 0 the steps are scored all the same: the equality is not that of a hook that did nothing.
    scored = [line.get("traj_evolve/mean_rho", 0.0) for line in lines]
    assert (min(scored) > 0.0) == (REPLAY in overrides), scored


@pytest.mark.parametrize("extra", ["traj_evolve.penalty=relative", "traj_evolve.level=step"])
def test_alpha_1_is_another_update(grpo: Run, tiny_model_dir: Path, tmp_path: Path, extra: str) -> None:
    trainer, lines = run_evolve(tiny_model_dir, tmp_path, STEPS, REPLAY, extra)
    assert lines[0]["traj_evolve/shaped_minus_raw"] < 0.0
    assert lines[0]["episode/reward/mean"] == grpo[0][0]["episode/reward/mean"]
    assert lines[0]["critic/rewards/mean"] < grpo[0][0]["critic/rewards/mean"]
    assert not same(policy_weights(trainer), grpo[1])
