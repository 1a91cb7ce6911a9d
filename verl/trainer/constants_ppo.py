# SPDX-License-Identifier: Apache-2.0
"""The name under which code written for verl imports the default Ray environment of the RL program."""

from verl.trainer.ppo.ray_setup import get_ppo_ray_runtime_env

__all__ = ["get_ppo_ray_runtime_env"]
