# SPDX-License-Identifier: Apache-2.0
"""Credit analysis of ALFWorld games."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from agent_system.step_discriminator.trajectory_analyzer.adapters import EnvAdapter, ReplayableGame
from verl.utils.errors import UserError

__all__ = ["ALFWORLD_ENV_NAME", "alfworld_adapter", "alfworld_reveals"]

ALFWORLD_ENV_NAME = "alfworld"
"""As in the trajectory records of training runs."""

_FIRST_SIGHT = re.compile(r"(go to|open) (.+)")
_WAY_OUT = "set --data-dir (or ALFWORLD_DATA) to the folder the games were played from"


def alfworld_reveals(action: str, observation: str) -> str | None:
    """Coming to a receptacle or opening it shows something; `Nothing happens.` shows nothing."""
    match = _FIRST_SIGHT.fullmatch(action.strip().lower())
    if match is None or observation.strip() == "Nothing happens.":
        return None
    return f"{'at' if match[1] == 'go to' else 'inside'} {match[2]}"


@lru_cache(maxsize=65536)
def _file_hash(path: str, mtime_ns: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


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


def alfworld_adapter(data_dir: Path | None) -> EnvAdapter:
    """Games below `data_dir` (default: $ALFWORLD_DATA, then ~/.cache/alfworld); UserError when there are none."""
    from agent_system.environments.env_package.alfworld.manifest import resolve_data_dir

    try:
        version = importlib.metadata.version("alfworld")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return EnvAdapter(
        make_game=_AlfworldGames(resolve_data_dir(data_dir)),
        reveals=alfworld_reveals,
        state_id=attrgetter("state_id"),
        versions={"alfworld": version},
    )
