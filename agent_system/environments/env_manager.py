# SPDX-License-Identifier: Apache-2.0
"""`make_envs`, and the managers under their public names (imported when asked for)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from agent_system.environments.base import EnvironmentManagerBase
from agent_system.environments.registry import env_factory
from verl.utils.absent import absent_name

if TYPE_CHECKING:
    from agent_system.environments.env_package.alfworld.manager import AlfWorldEnvironmentManager
    from agent_system.environments.env_package.webshop.manager import WebshopEnvironmentManager

__all__ = ["AlfWorldEnvironmentManager", "EnvironmentManagerBase", "WebshopEnvironmentManager", "make_envs"]

_LAZY = {
    "AlfWorldEnvironmentManager": "agent_system.environments.env_package.alfworld.manager",
    "WebshopEnvironmentManager": "agent_system.environments.env_package.webshop.manager",
}


class _EnvName(Protocol):
    @property
    def env_name(self) -> str: ...


class NamedEnvConfig(Protocol):
    """The part of the configuration that chooses the environment; its factory reads more."""

    @property
    def env(self) -> _EnvName: ...


def make_envs(config: NamedEnvConfig) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """(training manager, validation manager) of `config.env.env_name`. Nothing is started before the first reset.

    Training has `data.train_batch_size * env.rollout.n` slots and task seed `env.seed`; validation has
    `data.val_batch_size` slots and seed `env.seed + 1000`.

    Raises:
        UserError: unknown name, or the environment's data is missing.
    """
    factory = env_factory(config.env.env_name)
    return factory(config, True), factory(config, False)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    absent_name(__name__, name)
