# SPDX-License-Identifier: Apache-2.0
"""DAPO's own program: `python -m recipe.dapo.main_dapo key=value ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.utils.cli import hydra_program

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main"]


def _run(cfg: DictConfig) -> None:
    from verl.trainer.main_ppo import run_ppo

    run_ppo(cfg)


main = hydra_program(_run, "recipe.dapo.config", "dapo_trainer")

if __name__ == "__main__":
    main()
