# SPDX-License-Identifier: Apache-2.0
"""What the installed alfworld package knows about rooms and objects, read where it lies.

Only its data files and two modules of plain tables are touched; the package's environments are not imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from agent_system.environments.env_package.alfworld.problem import is_known_release
from verl.utils.errors import UserError

__all__ = ["Layout", "Tables", "load_layout", "load_tables"]


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of the installed package; class names are in the package's spelling (`SinkBasin`)."""

    domain: str
    grammar: str
    holds: Mapping[str, frozenset[str]]
    """Receptacle class (fixed ones only) -> object classes it may hold."""
    abilities: Mapping[str, frozenset[str]]
    """`Heatable`, `Coolable`, `Cleanable`, `Toggleable`, `Sliceable` -> object classes."""
    rooms: Mapping[str, tuple[str, ...]]
    """Task type -> room kinds where it makes sense, sorted."""
    scenes: Mapping[str, tuple[int, ...]]
    """Room kind -> scene numbers."""
    unseen_scenes: frozenset[int]
    movable_receptacles: frozenset[str]
    openable: frozenset[str]
    goals: Mapping[str, tuple[str, tuple[str, ...]]]
    """Task type -> goal condition and task sentences, with `{obj}`, `{recep}`, `{toggle}` to fill in."""
    layouts: Path


@dataclass(frozen=True, slots=True)
class Layout:
    """One scene: receptacle id -> pose (x, z, rotation, horizon; metres and degrees), and the classes seen in it."""

    receptacles: Mapping[str, tuple[float, float, float, float]]
    classes: tuple[str, ...]


def _package_folder() -> Path:
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise UserError(
            "Generating games reads rooms and rules from the alfworld package, which is not installed; "
            "pip install alfworld==0.4.2 (Python 3.11)."
        )
    return Path(spec.origin).parent


@lru_cache(maxsize=1)
def load_tables() -> Tables:
    """Read the installed package's tables once per process.

    Raises:
        UserError: alfworld is not installed, or is a release whose rules the simulator does not know.
    """
    folder = _package_folder()
    domain = (folder / "data" / "alfred.pddl").read_text(encoding="utf-8")
    grammar = (folder / "data" / "alfred.twl2").read_text(encoding="utf-8")
    if not is_known_release(domain, grammar):
        raise UserError(
            f"The alfworld package in {folder} has rules that the simulator does not know, so generated games could "
            "not be proven winnable; install alfworld==0.4.2."
        )
    constants = importlib.import_module("alfworld.gen.constants")
    library = importlib.import_module("alfworld.gen.goal_library")
    movable = frozenset(constants.MOVABLE_RECEPTACLES)
    return Tables(
        domain=domain,
        grammar=grammar,
        holds={k: frozenset(v) for k, v in constants.VAL_RECEPTACLE_OBJECTS.items() if k not in movable},
        abilities={k: frozenset(v) for k, v in constants.VAL_ACTION_OBJECTS.items()},
        rooms={task: tuple(sorted(constants.GOALS_VALID[task])) for task in TASK_TYPES},
        scenes={room: tuple(numbers) for room, numbers in constants.SCENE_TYPE.items()},
        unseen_scenes=frozenset(constants.TEST_SCENE_NUMBERS),
        movable_receptacles=movable,
        openable=frozenset(constants.OPENABLE_CLASS_LIST) - movable,
        goals={
            task: (library.gdict[task]["pddl"].replace("#", "-"), tuple(library.gdict[task]["templates"]))
            for task in TASK_TYPES
        },
        layouts=folder / "gen" / "layouts",
    )


@lru_cache(maxsize=256)
def load_layout(number: int) -> Layout:
    """Read the layout of scene `number` (1-30 kitchens, 201-230 living rooms, 301-330 bedrooms, 401-430 bathrooms)."""
    folder = load_tables().layouts
    poses = json.loads((folder / f"FloorPlan{number}-openable.json").read_text(encoding="utf-8"))
    classes = json.loads((folder / f"FloorPlan{number}-objects.json").read_text(encoding="utf-8"))
    return Layout(
        {name: (float(x), float(z), float(turn), float(tilt)) for name, (x, z, turn, tilt) in sorted(poses.items())},
        tuple(sorted(classes)),
    )
