# SPDX-License-Identifier: Apache-2.0
"""TRIAL's program: `python -m recipe.trial.main key=value ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.utils.cli import hydra_program

if TYPE_CHECKING:
    from omegaconf import DictConfig


def _run(cfg: DictConfig) -> None:
    from verl.trainer.main_ppo import run_ppo

    run_ppo(cfg, extra_recipe_modules=("recipe.trial",))


main = hydra_program(_run, "recipe.trial.config", "trial_trainer")

if __name__ == "__main__":
    main()
