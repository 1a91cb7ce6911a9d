# SPDX-License-Identifier: Apache-2.0
"""WebShop as a text environment of our own: catalogue, search, reward, sessions, generator, experts, manager."""

from __future__ import annotations

from agent_system.environments.env_package.webshop.envs import build_webshop_envs
from agent_system.environments.env_package.webshop.projection import webshop_projection

__all__ = ["build_webshop_envs", "webshop_projection"]
