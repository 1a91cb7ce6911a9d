# SPDX-License-Identifier: Apache-2.0
"""Environments by name. Registering stores a string; the environment's code is imported when it is first asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from agent_system.environments.base import EnvironmentManagerBase
from verl.utils.errors import UserError

__all__ = ["EnvFactory", "env_factory", "known_environments", "register"]

# (config, is_train) -> manager with all its slots.
EnvFactory = Callable[[Any, bool], EnvironmentManagerBase]

_ENTRY_POINTS: dict[str, str] = {
    "alfworld": "agent_system.environments.env_package.alfworld.manager:make_alfworld_manager",
    "webshop": "agent_system.environments.env_package.webshop.manager:make_webshop_manager",
}


def register(name: str, entry_point: str) -> None:
    """Make `env.env_name=name` (or `name/anything`) build its manager with `entry_point`, "module:function".

    The function takes (config, is_train) and returns a manager. Registering the same pair again does nothing.

    Raises:
        ValueError: another entry point has the name already, or `entry_point` has no colon.
    """
    if entry_point.count(":") != 1:
        raise ValueError(f"entry point {entry_point!r} of environment {name!r} must read module:function")
    key = name.lower()
    if _ENTRY_POINTS.get(key, entry_point) != entry_point:
        raise ValueError(f"environment {name!r} is registered already, with {_ENTRY_POINTS[key]}")
    _ENTRY_POINTS[key] = entry_point


def known_environments() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(_ENTRY_POINTS))


def env_factory(env_name: str) -> EnvFactory:
    """The factory of `env_name`, looked up by the part before the first slash, case-insensitively.

    Raises:
        UserError: unknown name; lists the known ones.
    """
    family = env_name.split("/", 1)[0].lower()
    if family not in _ENTRY_POINTS:
        near = difflib.get_close_matches(family, _ENTRY_POINTS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"env.env_name={env_name}: no such environment{hint}; known: {', '.join(known_environments())}."
        )
    module_name, function = _ENTRY_POINTS[family].split(":")
    factory: EnvFactory = getattr(importlib.import_module(module_name), function)
    return factory
