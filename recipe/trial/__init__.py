# SPDX-License-Identifier: Apache-2.0
"""TRIAL (arXiv 2608.07371): GRPO plus token supervision from hindsight, shared out within each trajectory."""

from recipe.trial.options import TrialConfig
from verl.trainer.ppo.recipes import register_recipe

__all__ = ["TrialConfig"]

register_recipe("trial", config_key="trial", config_cls=TrialConfig, hook="recipe.trial.hook:TrialHook")
