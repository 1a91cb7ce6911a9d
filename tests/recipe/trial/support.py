# SPDX-License-Identifier: Apache-2.0
"""TRIAL runs on the TOY game in this process: everything is real but the size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.recipe.traj_evolve.support import logged
from tests.verl.trainer.toy_run import toy_overrides, toy_trainer
from verl.trainer.config.schema import PPOConfig, load_config
from verl.trainer.main_ppo import read_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.recipes import Recipe

MODULE = "recipe.trial"
# Several tokens a turn, and episodes of one turn among longer ones.
TOKENS = "data.max_response_length=4"


def read_trial_config(overrides: list[str]) -> tuple[PPOConfig, tuple[Recipe, ...]]:
    """The recipe's own config, through the entry's own reading and checks."""
    return read_config(load_config("trial_trainer", overrides, "recipe.trial.config"), (MODULE,))


def trial_trainer(model: Path, folder: Path, *overrides: str, **kwargs: Any) -> RayPPOTrainer:
    config, recipes = read_trial_config([*toy_overrides(model, folder), "env.env_name=toy", TOKENS, *overrides])
    trainer = toy_trainer(config, recipes=recipes, **kwargs)
    trainer.init_workers()
    return trainer


def run_trial(model: Path, folder: Path, *overrides: str, **kwargs: Any) -> tuple[RayPPOTrainer, list[dict[str, Any]]]:
    """Train; returns the trainer and the logged lines of its folder."""
    trainer = trial_trainer(model, folder, *overrides, **kwargs)
    trainer.fit()
    return trainer, logged(folder)
