# SPDX-License-Identifier: Apache-2.0
"""What the analysis must know of an environment, and the environments it knows.

An environment is added with one function, its *adapter builder*: (data folder or None) -> `EnvAdapter`. Put it into a
module of its own, heavy imports inside the function, and name it in `_BUILDERS` below as "module:function" (or call
`register_adapter` from a module given to `analyze --import`). An `EnvAdapter` says

* `make_game`: how a record's `task` becomes a `ReplayableGame`. It checks that the task is the one that was played
  (content hash, catalogue hash) and raises `UserError` with file and way out when it cannot be rebuilt;
* `score`: how good one step left the task, in [0, 1]. An episode succeeds at its first step whose score reaches
  `CreditOptions.success_threshold` (1.0: solved), and its replays are cut there. A deletion succeeds at its first
  step whose score reaches the one of the whole trajectory, so with a lower threshold "redundant" means that the final
  score does not fall. A step that does not end an episode may well score 0.0;
* `reveals`: which step showed a place or page, for the kind `exploration`. Optional;
* `state_id`: the cheapest value that identifies the present state. Optional, `state_key` without it.

Games are used from one thread. Adapters travel to worker processes, so every field must be picklable: functions and
classes of a module, not lambdas. Labels are exact as long as the future of a game depends on nothing but its state and
the actions to come; a step counter that ends episodes must therefore not be part of the game.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from verl.utils.errors import UserError

__all__ = [
    "AdapterBuilder",
    "EnvAdapter",
    "EnvFactory",
    "ReplayableGame",
    "RevealTest",
    "ScoreTest",
    "StateId",
    "base_env_name",
    "get_adapter",
    "register_adapter",
    "require_adapter",
    "won_score",
]


class ReplayableGame(Protocol):
    """One task, to be played again and again from any state it was in."""

    @property
    def state_key(self) -> str:
        """Name of the present state, equal in every process; equal keys mean: equal reaction to all further actions."""

    def reset(self) -> tuple[str, Mapping[str, Any]]:
        """Start from the beginning of the task; observation and info."""

    def step(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Observation, reward, done, info. Any text is accepted; one that is not possible does what the environment
        does with it. Not called after `done` without a `restore` or `reset` in between."""

    def snapshot(self) -> Any:
        """The present state, for `restore` of the same game; stays valid and is not changed by later steps."""

    def restore(self, snapshot: Any) -> Any:
        """Continue from a snapshot; what it returns is not used."""


EnvFactory = Callable[[Mapping[str, Any]], ReplayableGame]
"""The `task` of a trajectory -> a game of that task; raises UserError or OSError when it cannot be built."""

ScoreTest = Callable[[float, bool, Mapping[str, Any]], float]
"""(reward, done, info) of one step -> score in [0, 1], 1.0 when the task is solved."""

RevealTest = Callable[[str, str], str | None]
"""(action, the environment's answer) -> name of the place or page that it showed, or None. A name counts as new where
it comes up first in a trajectory; the opening text is asked about with the empty action."""

StateId = Callable[[Any], Hashable]
"""Game -> a value that identifies its present state. Equal exactly when `state_key` is; compared only with values of
the same game object, so it may be anything hashable that is cheap to make."""


def won_score(reward: float, done: bool, info: Mapping[str, Any]) -> float:
    """1.0 for success as the environment itself reports it in `info["won"]`, else 0.0."""
    return 1.0 if info["won"] else 0.0


@dataclass(frozen=True)
class EnvAdapter:
    """One environment, ready to rebuild its tasks (see the text of this module)."""

    make_game: EnvFactory
    reveals: RevealTest | None = None
    score: ScoreTest = won_score
    state_id: StateId = attrgetter("state_key")
    versions: Mapping[str, str | None] | None = None
    """Versions that the header of an analysis names."""


AdapterBuilder = Callable[[Path | None], EnvAdapter]
"""Data folder (None: the environment's own default) -> adapter; raises UserError when there is no data."""

_BUILDERS: dict[str, AdapterBuilder | str] = {
    "alfworld": "agent_system.step_discriminator.trajectory_analyzer.alfworld_adapter:alfworld_adapter",
    "webshop": "agent_system.step_discriminator.trajectory_analyzer.webshop_adapter:webshop_adapter",
}


def register_adapter(name: str, builder: AdapterBuilder | str) -> None:
    """Make an environment known to the programs of this package.

    Args:
        name: the part of `env_name` before the slash.
        builder: the function, or "module:function" to import it when it is first needed.
    """
    _BUILDERS[name.lower()] = builder


def base_env_name(env_name: str) -> str:
    """`alfworld/AlfredTWEnv` -> `alfworld`."""
    return env_name.split("/")[0].lower()


def require_adapter(env_name: str) -> AdapterBuilder:
    """The builder of an environment's adapter, without touching its data; UserError with the known names otherwise."""
    name = base_env_name(env_name)
    if name not in _BUILDERS:
        raise UserError(
            f"env_name={env_name}: credit analysis knows {', '.join(sorted(_BUILDERS))}; name a module that registers "
            "an adapter of your own (register_adapter) with analyze's --import, or in algorithm.recipe_modules."
        )
    builder = _BUILDERS[name]
    if isinstance(builder, str):
        module, _, function = builder.partition(":")
        found: AdapterBuilder = getattr(importlib.import_module(module), function)
        return found
    return builder


def get_adapter(env_name: str, data_dir: str | Path | None) -> EnvAdapter:
    """The adapter of an environment; UserError with the known names otherwise."""
    return require_adapter(env_name)(None if data_dir is None else Path(data_dir))
