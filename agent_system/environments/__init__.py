# SPDX-License-Identifier: Apache-2.0
"""Environments: vector env, manager contract, registry, one package per environment."""

from agent_system.environments.base import EnvironmentManagerBase
from agent_system.environments.env_manager import make_envs
from agent_system.environments.registry import register
from agent_system.environments.task_stream import TaskStream

__all__ = ["EnvironmentManagerBase", "TaskStream", "make_envs", "register"]
