# SPDX-License-Identifier: Apache-2.0
"""Sokoban: how a model's text is read. The environment itself is not part of this version."""

from __future__ import annotations

from typing import Any

from agent_system.environments.env_package.sokoban.projection import sokoban_projection
from verl.utils.absent import absent_name

__all__ = ["sokoban_projection"]


def __getattr__(name: str) -> Any:
    absent_name(__name__, name)
