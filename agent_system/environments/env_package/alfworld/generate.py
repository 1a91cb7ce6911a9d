# SPDX-License-Identifier: Apache-2.0
"""A folder of generated games in ALFWorld's layout, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_system.environments.env_package.alfworld.cache import cache_dir
from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from agent_system.environments.env_package.alfworld.manifest import GAMES_FOLDER, SPLITS, load_manifest
from agent_system.environments.env_package.alfworld.package_data import load_tables
from agent_system.environments.env_package.alfworld.sampler import GeneratedGame, Sampler
from agent_system.environments.generated_folder import identity_hash, write_generated
from verl.utils.errors import UserError

__all__ = ["GenerationOptions", "ensure_generated", "generate_games"]

# Raised whenever equal options give other games than before.
_GENERATOR_VERSION = 1


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What determines a set of generated games: equal options give equal files."""

    train: int = 200
    valid_seen: int = 24
    valid_unseen: int = 24
    seed: int = 0
    max_receptacles: int | None = None
    max_objects: int | None = None
    max_object_classes: int | None = None

    def __post_init__(self) -> None:
        for name in ("train", "valid_seen", "valid_unseen", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} is negative; set it to 0 or more.")
        if self.train + self.valid_seen + self.valid_unseen == 0:
            raise UserError("No games are asked for; set train, valid_seen or valid_unseen above 0.")

    def count(self, split: str) -> int:
        """Number of games of a split."""
        return {"train": self.train, "valid_seen": self.valid_seen, "valid_unseen": self.valid_unseen}[split]


def generate_games(
    out: str | Path,
    train: int = 200,
    valid_seen: int = 24,
    valid_unseen: int = 24,
    seed: int = 0,
    max_receptacles: int | None = None,
    max_objects: int | None = None,
    max_object_classes: int | None = None,
) -> Path:
    """Write a data folder of generated games; nothing is done when `out` holds the same generation already.

    Task types take turns. `valid_unseen` plays in scenes that no training game uses, `valid_seen` in scenes of the
    training games. Every game is won by its recorded plan. The folder appears under its name only when complete.

    Args:
        out: folder to make; it must not exist, be empty, or hold the same generation.
        train, valid_seen, valid_unseen: numbers of games.
        seed: 0 or more; equal arguments give equal files.
        max_receptacles, max_objects, max_object_classes: see `Sampler`.

    Returns:
        `out` as a path, usable as ALFWORLD_DATA.

    Raises:
        UserError: an argument is out of range, `out` holds something else, or alfworld is not installed.
    """
    options = GenerationOptions(
        train, valid_seen, valid_unseen, seed, max_receptacles, max_objects, max_object_classes
    )  # fmt: skip
    sampler = Sampler(max_receptacles, max_objects, max_object_classes)
    return write_generated(
        out, _identity(options), "games", lambda folder: _write_all(folder, sampler, options), _first_changed
    )


def ensure_generated(out: str | Path | None = None, **options: Any) -> Path:
    """`generate_games` with a default place: ~/.cache/trajevolve/alfworld-<hash of the options>."""
    if out is None:
        out = cache_dir() / f"alfworld-{identity_hash(_identity(GenerationOptions(**options)))}"
    return generate_games(out, **options)


def _identity(options: GenerationOptions) -> dict[str, Any]:
    return {"generator_version": _GENERATOR_VERSION, "options": asdict(options)}


def _first_changed(folder: Path, hashes: Mapping[str, str]) -> Path | None:
    changed = (split for split, digest in hashes.items() if load_manifest(folder, split).hash != digest)
    return next((folder / GAMES_FOLDER / split for split in changed), None)


def _write_all(folder: Path, sampler: Sampler, options: GenerationOptions) -> dict[str, Any]:
    tables = load_tables()
    everywhere = frozenset(number for numbers in tables.scenes.values() for number in numbers)
    seen_scenes = everywhere - tables.unseen_scenes
    used: set[int] = set()
    for code, split in enumerate(SPLITS):
        # A small training set may have no scene for some task type: then any scene that training may use will do.
        pools = {
            "train": (seen_scenes,),
            "valid_seen": (frozenset(used), seen_scenes),
            "valid_unseen": (tables.unseen_scenes,),
        }[split]
        for number in range(options.count(split)):
            rng = np.random.default_rng([options.seed, code, number])
            task_type = TASK_TYPES[number % len(TASK_TYPES)]
            drawn = (sampler.sample(task_type, scenes, rng) for scenes in pools)
            game = next((found for found in drawn if found is not None), None)
            if game is None:
                raise UserError(
                    f"No game of the type {task_type} fits the limits; raise max_receptacles or max_object_classes."
                )
            if split == "train":
                used.add(game.spec.scene)
            trial = f"trial_T{code}{options.seed:07d}_{number:06d}_{rng.integers(1_000_000):06d}"
            _write_game(folder / GAMES_FOLDER / split, trial, game)
    return {"hashes": {split: load_manifest(folder, split).hash for split in SPLITS if options.count(split)}}


def _write_game(root: Path, trial: str, game: GeneratedGame) -> None:
    spec = game.spec
    goal_place = spec.receptacle_class or spec.lamp_class
    folder = root / f"{spec.task_type}-{spec.object_class}-None-{goal_place}-{spec.scene}" / trial
    folder.mkdir(parents=True)
    game_file = {
        "pddl_domain": load_tables().domain,
        "grammar": game.grammar,
        "pddl_problem": game.problem,
        "solvable": True,
        "walkthrough": list(game.plan),
    }
    trajectory = {
        "task_id": trial,
        "task_type": spec.task_type,
        "pddl_params": {
            "mrecep_target": "",
            "object_sliced": False,
            "object_target": spec.object_class,
            "parent_target": spec.receptacle_class,
            "toggle_target": spec.lamp_class,
        },
        "turk_annotations": {"anns": [{"task_desc": game.sentence, "high_descs": []}]},
        "scene": {"floor_plan": f"FloorPlan{spec.scene}", "scene_num": spec.scene},
        "plan": {"high_pddl": [], "low_actions": []},
        "images": [],
        "generated": True,
    }
    (folder / "game.tw-pddl").write_text(json.dumps(game_file), encoding="utf-8")
    (folder / "traj_data.json").write_text(json.dumps(trajectory), encoding="utf-8")
    (folder / "initial_state.pddl").write_text(game.problem, encoding="utf-8")
