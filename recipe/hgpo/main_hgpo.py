# SPDX-License-Identifier: Apache-2.0
"""HGPO's own program: `python -m recipe.hgpo.main_hgpo key=value ...`; `verl.trainer.main_ppo` runs it just as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.utils.cli import hydra_program

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["create_rl_dataset", "create_rl_sampler", "main"]


def _run(cfg: DictConfig) -> None:
    from verl.trainer.main_ppo import run_ppo

    run_ppo(cfg, extra_recipe_modules=("recipe.hgpo",))


main = hydra_program(_run, "recipe.hgpo.config", "hgpo_trainer")

if __name__ == "__main__":
    main()
