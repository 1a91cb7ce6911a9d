# SPDX-License-Identifier: Apache-2.0
"""ALFWorld text games: a fast engine, game generator, experts, and lists of games."""

from __future__ import annotations

from agent_system.environments.env_package.alfworld.game import AlfworldGame
from agent_system.environments.env_package.alfworld.manifest import load_manifest

__all__ = ["AlfworldGame", "load_manifest"]
