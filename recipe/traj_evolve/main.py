# SPDX-License-Identifier: Apache-2.0
"""Stage 3 program: `python -m recipe.traj_evolve.main traj_evolve.discriminator_model_path=DIR key=value ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.utils.cli import hydra_program

if TYPE_CHECKING:
    from omegaconf import DictConfig


def _run(cfg: DictConfig) -> None:
    from verl.trainer.main_ppo import run_ppo

    run_ppo(cfg, extra_recipe_modules=("recipe.traj_evolve",))


main = hydra_program(_run, "recipe.traj_evolve.config", "traj_evolve_trainer")

if __name__ == "__main__":
    main()
