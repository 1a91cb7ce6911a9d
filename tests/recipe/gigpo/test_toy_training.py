# SPDX-License-Identifier: Apache-2.0
"""GiGPO and HGPO learn the TOY game with a tiny random model, and log what they should on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recipe.gigpo
import recipe.hgpo  # noqa: F401
from tests.helpers.tiny import make_tiny_model
from tests.verl.trainer.toy_run import run_toy, toy_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("toy_model") / "hf")


@pytest.mark.parametrize("name", ["gigpo", pytest.param("hgpo", marks=pytest.mark.slow)])
def test_it_learns_the_toy_game(model: Path, tmp_path: Path, name: str) -> None:
    config = toy_config(
        model, tmp_path, "trainer.total_epochs=40", f"algorithm.adv_estimator={name}", "algorithm.gamma=0.95",
        "algorithm.gigpo.mode=mean_std_norm", "env.history_length=2",
    )  # fmt: skip
    _, lines = run_toy(config)
    rates = [line["episode/success_rate"] for line in lines]
    before, after = float(np.mean(rates[:2])), float(np.mean(rates[-5:]))
    assert before < 0.4 and after > 0.8, (before, after)
    if name == "gigpo":
        assert all(line["gigpo/step_group_size/mean"] > 1 for line in lines)
