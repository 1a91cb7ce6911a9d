# SPDX-License-Identifier: Apache-2.0
"""What the analysis must know of each environment: how to rebuild a task, what success is, what a step reveals."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_system.step_discriminator.trajectory_analyzer.label import EnvFactory, RevealTest
from agent_system.step_discriminator.trajectory_analyzer.replay import ReplayableGame, SuccessTest, reported_won
from verl.utils.errors import UserError

__all__ = [
    "EnvAdapter",
    "alfworld_reveals",
    "base_env_name",
    "get_adapter",
    "register_adapter",
    "require_adapter",
]


@dataclass(frozen=True)
class EnvAdapter:
    """One environment, ready to rebuild games."""

    make_game: EnvFactory
    reveals: RevealTest | None = None
    is_success: SuccessTest = reported_won
    versions: Mapping[str, str | None] | None = None
    """Versions that the header of an analysis names."""


AdapterBuilder = Callable[[Path | None], EnvAdapter]
"""Data folder (None: the environment's own default) -> adapter; raises UserError when there is no data."""

_BUILDERS: dict[str, AdapterBuilder] = {}


def register_adapter(name: str, builder: AdapterBuilder) -> None:
    """Make an environment known to the programs of this package; `name` is the part of `env_name` before the slash."""
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
    return _BUILDERS[name]


def get_adapter(env_name: str, data_dir: str | Path | None) -> EnvAdapter:
    """The adapter of an environment; UserError with the known names otherwise."""
    return require_adapter(env_name)(None if data_dir is None else Path(data_dir))


_FIRST_SIGHT = re.compile(r"(go to|open) (.+)")


def alfworld_reveals(action: str, observation: str) -> str | None:
    """Coming to a receptacle or opening it shows something; `Nothing happens.` shows nothing."""
    match = _FIRST_SIGHT.fullmatch(action.strip().lower())
    if match is None or observation.strip() == "Nothing happens.":
        return None
    return f"{'at' if match[1] == 'go to' else 'inside'} {match[2]}"


@lru_cache(maxsize=65536)
def _file_hash(path: str, mtime_ns: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


_WAY_OUT = "set --data-dir (or ALFWORLD_DATA) to the folder the games were played from"


class _AlfworldGames:
    """Rebuilds the game of a task record below one data folder."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def __call__(self, task: Mapping[str, Any]) -> ReplayableGame:
        from agent_system.environments.env_package.alfworld import AlfworldGame

        gamefile = task.get("gamefile")
        if not isinstance(gamefile, str):
            raise UserError("the record's task has no `gamefile`; it cannot be rebuilt.")
        path = self._data_dir / gamefile
        if not path.is_file():
            raise UserError(f"the game {path} does not exist; {_WAY_OUT}.")
        expected = task.get("sha256")
        if expected is not None and _file_hash(str(path), path.stat().st_mtime_ns) != expected:
            raise UserError(
                f"the game {path} is not the one that was played (its sha256 differs from the record's); {_WAY_OUT}."
            )
        game: ReplayableGame = AlfworldGame(path)
        return game


def _alfworld(data_dir: Path | None) -> EnvAdapter:
    from agent_system.environments.env_package.alfworld.manifest import resolve_data_dir

    try:
        version = importlib.metadata.version("alfworld")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return EnvAdapter(
        make_game=_AlfworldGames(resolve_data_dir(data_dir)),
        reveals=alfworld_reveals,
        versions={"alfworld": version},
    )


register_adapter("alfworld", _alfworld)
