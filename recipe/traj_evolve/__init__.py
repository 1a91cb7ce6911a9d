# SPDX-License-Identifier: Apache-2.0
"""TrajEvolve, stage 3: GRPO whose rewards know which steps of a success were needed."""

from recipe.traj_evolve.options import TrajEvolveConfig
from verl.trainer.ppo.recipes import register_recipe

__all__ = ["TrajEvolveConfig"]

register_recipe(
    "traj_evolve",
    config_key="traj_evolve",
    config_cls=TrajEvolveConfig,
    hook="recipe.traj_evolve.hook:TrajEvolveHook",
)
