# SPDX-License-Identifier: Apache-2.0
"""Which games a data folder holds: a sorted list per split with content hashes, and one hash for the list."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from verl.utils.errors import UserError

__all__ = ["GAMES_FOLDER", "SPLITS", "GameEntry", "Manifest", "load_manifest", "resolve_data_dir"]

SPLITS: tuple[str, ...] = ("train", "valid_seen", "valid_unseen")
GAMES_FOLDER = "json_2.1.1"
_GAME_FILE, _TRAJECTORY_FILE = "game.tw-pddl", "traj_data.json"


@dataclass(frozen=True, slots=True)
class GameEntry:
    """One game: path relative to the data folder (with `/`), task type, SHA-256 of the game file."""

    path: str
    task_type: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The playable games of one split, sorted by path.

    `skipped` counts, by reason, the folders left out; `hash` depends on the paths and contents of the games and on
    nothing else.
    """

    split: str
    data_dir: Path
    games: tuple[GameEntry, ...]
    skipped: Mapping[str, int]
    hash: str

    def gamefile(self, entry: GameEntry) -> Path:
        """Where the game file of an entry lies."""
        return self.data_dir / entry.path


def resolve_data_dir(data_dir: str | Path | None) -> Path:
    """`data_dir`, else $ALFWORLD_DATA, else ~/.cache/alfworld (where alfworld-download puts the data)."""
    if data_dir is not None:
        return Path(os.path.expandvars(data_dir)).expanduser()
    return Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()


def load_manifest(data_dir: str | Path | None, split: str) -> Manifest:
    """List the playable games of a split.

    Left out and counted, as the stock loader does: tasks with a movable receptacle or sliced objects, other task
    types, folders without a game file, games marked unsolvable or not marked.

    Args:
        data_dir: the folder that contains `json_2.1.1`; None looks where `resolve_data_dir` says.
        split: one of `SPLITS`.

    Raises:
        UserError: the split is unknown, the folder is missing or holds no playable game, or a file is unreadable.
    """
    if split not in SPLITS:
        raise UserError(f"Unknown ALFWorld split {split!r}; choose one of {', '.join(SPLITS)}.")
    folder = resolve_data_dir(data_dir)
    root = folder / GAMES_FOLDER / split
    skipped: Counter[str] = Counter()
    games = []
    for trajectory in sorted(root.glob(f"*/*/{_TRAJECTORY_FILE}")) if root.is_dir() else []:
        entry = _entry(folder, trajectory, skipped)
        if entry is not None:
            games.append(entry)
    if not games:
        found = "does not exist" if not root.is_dir() else f"holds no playable game (skipped: {dict(skipped)})"
        raise UserError(
            f"No ALFWorld games: {root} {found}. Set ALFWORLD_DATA (or env.alfworld.data_dir, or --data-dir) to the "
            f"folder that contains {GAMES_FOLDER}, after alfworld-download; or use generated games: "
            "env.alfworld.source=generated, or python -m "
            "agent_system.environments.env_package.alfworld.generate_games --out DIR."
        )
    games.sort(key=lambda entry: entry.path)
    text = "".join(f"{entry.path}\t{entry.sha256}\n" for entry in games)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Manifest(split, folder, tuple(games), dict(skipped), digest)


def _entry(folder: Path, trajectory: Path, skipped: Counter[str]) -> GameEntry | None:
    game = trajectory.parent / _GAME_FILE
    path = game.relative_to(folder).as_posix()
    # Both words are looked for in the path, as the stock loader does it.
    if "movable" in path or "Sliced" in path:
        skipped["movable receptacle" if "movable" in path else "sliced object"] += 1
        return None
    try:
        task_type = json.loads(trajectory.read_bytes())["task_type"]
        if task_type not in TASK_TYPES:
            skipped["other task type"] += 1
            return None
        if not game.is_file():
            skipped["no game file"] += 1
            return None
        content = game.read_bytes()
        solvable = json.loads(content).get("solvable")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"The game folder {trajectory.parent} is unreadable ({type(error).__name__}: {error}); download or "
            "generate the data again, or remove this folder."
        ) from error
    if not solvable:
        skipped["unsolvable" if solvable is not None else "not marked solvable"] += 1
        return None
    return GameEntry(path, task_type, hashlib.sha256(content).hexdigest())
