# SPDX-License-Identifier: Apache-2.0
"""Which games a data folder holds: a sorted list per split with content hashes, and one hash for the list."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.alfworld.cache import cache_dir, read_cached, write_cached
from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from verl.utils.errors import UserError

__all__ = [
    "FULL_RELEASE",
    "GAMES_FOLDER",
    "SPLITS",
    "GameEntry",
    "Manifest",
    "check_split",
    "load_manifest",
    "resolve_data_dir",
]

FULL_RELEASE: Mapping[str, int] = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
"""Playable games of the data release, by split."""
SPLITS: tuple[str, ...] = tuple(FULL_RELEASE)
GAMES_FOLDER = "json_2.1.1"
# Raised whenever equal files give other entries than before.
_CACHE_VERSION = 1
# A file may change twice within a clock tick, so what was written so recently is read again next time.
_SETTLED_NS = 2_000_000_000
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

    def summary(self) -> str:
        """The counts in one line, for logs and the command line."""
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items())) or "none"
        full = FULL_RELEASE[self.split]
        of_release = "" if len(self.games) == full else f" (the full release has {full:,})"
        return f"{self.split}: {len(self.games):,} games{of_release}, left out: {left_out}, hash {self.hash[:16]}"


def resolve_data_dir(data_dir: str | Path | None) -> Path:
    """`data_dir`, else $ALFWORLD_DATA, else ~/.cache/alfworld (where alfworld-download puts the data)."""
    if data_dir is not None:
        return Path(os.path.expandvars(data_dir)).expanduser()
    return Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()


def check_split(split: str) -> None:
    """Refuse a name that is none of `SPLITS` with a `UserError`."""
    if split not in SPLITS:
        raise UserError(f"Unknown ALFWorld split {split!r}; choose one of {', '.join(SPLITS)}.")


def load_manifest(data_dir: str | Path | None, split: str) -> Manifest:
    """List the playable games of a split.

    Left out and counted, as the stock loader does: tasks with a movable receptacle or sliced objects, other task
    types, folders without a game file or a traj_data.json, games marked unsolvable or not marked.

    Args:
        data_dir: the folder that contains `json_2.1.1`; None looks where `resolve_data_dir` says.
        split: one of `SPLITS`.

    Raises:
        UserError: the split is unknown, the folder is missing or holds no playable game, or a file is unreadable.
    """
    check_split(split)
    folder = resolve_data_dir(data_dir)
    root = folder / GAMES_FOLDER / split
    rows = _scan(root) if root.is_dir() else {}
    skipped = Counter(row["skipped"] for row in rows.values() if "skipped" in row)
    games = [
        GameEntry(f"{GAMES_FOLDER}/{split}/{name}/{_GAME_FILE}", row["task_type"], row["sha256"])
        for name, row in rows.items()
        if "skipped" not in row
    ]
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


def _scan(root: Path) -> dict[str, dict[str, Any]]:
    """What each game folder of a split is: folder relative to `root` -> `skipped`, or `task_type` and `sha256`.

    Files are read once: their times and sizes, and what was found, are kept in the user's cache folder.
    """
    name = hashlib.sha256(os.path.realpath(root).encode("utf-8")).hexdigest()[:24]
    path = cache_dir() / "alfworld-manifests" / f"v{_CACHE_VERSION}" / f"{name}.json.z"
    known = _read_rows(path)
    settled = time.time_ns() - _SETTLED_NS
    rows = {}
    for folder, stamp in _folders(root):
        row = known.get(folder)
        if row is None or row["stamp"] != stamp:
            row = {"stamp": stamp, **_examine(root, folder)}
        rows[folder] = row
    keep = {folder: row for folder, row in rows.items() if max(row["stamp"][0::2]) < settled}
    if keep != known:
        write_cached(path, json.dumps(keep).encode("utf-8"))
    return rows


def _read_rows(path: Path) -> dict[str, dict[str, Any]]:
    content = read_cached(path)
    if content is None:
        return {}
    try:
        rows: dict[str, dict[str, Any]] = json.loads(content)
        complete = all(
            len(row["stamp"]) == 4 and ("skipped" in row or {"task_type", "sha256"} <= set(row))
            for row in rows.values()
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}
    return rows if complete else {}


def _folders(root: Path) -> Iterator[tuple[str, list[int]]]:
    """Game folders in a fixed order, each with time and size of its trajectory and game file (0 where missing)."""
    for task in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
        for trial in sorted(entry.name for entry in os.scandir(root / task) if entry.is_dir()):
            stamp = _stamp(os.path.join(root, task, trial, _TRAJECTORY_FILE))
            stamp += _stamp(os.path.join(root, task, trial, _GAME_FILE))
            if any(stamp):
                yield f"{task}/{trial}", stamp


def _stamp(path: str) -> list[int]:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return [0, 0]
    return [stat.st_mtime_ns, stat.st_size]


def _examine(root: Path, folder: str) -> dict[str, str]:
    """`skipped` with the reason, or `task_type` and `sha256`."""
    place = root / folder
    # Both words are looked for in the path, as the stock loader does it.
    for word, reason in (("movable", "movable receptacle"), ("Sliced", "sliced object")):
        if word in folder:
            return {"skipped": reason}
    if not (place / _TRAJECTORY_FILE).is_file():
        return {"skipped": "no traj_data.json"}
    try:
        task_type = json.loads((place / _TRAJECTORY_FILE).read_bytes())["task_type"]
        if task_type not in TASK_TYPES:
            return {"skipped": "other task type"}
        if not (place / _GAME_FILE).is_file():
            return {"skipped": "no game file"}
        content = (place / _GAME_FILE).read_bytes()
        solvable = json.loads(content).get("solvable")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"The game folder {place} is unreadable ({type(error).__name__}: {error}); download or generate the data "
            "again, or remove this folder."
        ) from error
    if not solvable:
        return {"skipped": "unsolvable" if solvable is not None else "not marked solvable"}
    return {"task_type": task_type, "sha256": hashlib.sha256(content).hexdigest()}
