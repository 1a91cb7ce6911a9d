# SPDX-License-Identifier: Apache-2.0
"""ALFWorld text games: a fast engine, game generator, experts, and lists of games."""

from __future__ import annotations

from agent_system.environments.env_package.alfworld.envs import build_alfworld_envs
from agent_system.environments.env_package.alfworld.game import AlfworldGame
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from agent_system.environments.env_package.alfworld.projection import alfworld_projection

__all__ = ["AlfworldGame", "alfworld_projection", "build_alfworld_envs", "load_manifest"]
