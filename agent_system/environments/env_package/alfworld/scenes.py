# SPDX-License-Identifier: Apache-2.0
"""Rooms for generated games: a package layout, completed with the fixtures it has no position for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from agent_system.environments.env_package.alfworld.package_data import load_layout, load_tables

__all__ = ["Fixture", "Scene", "load_scene", "mangle", "random_position"]

# How many of a fixture stand in a room when the layout names its class without positions.
_COPIES = {"StoveBurner": 4}
_SEED = 20_190


@dataclass(frozen=True, slots=True)
class Fixture:
    """A receptacle that stands in a room: object id, class, id of the place from which it is reached."""

    name: str
    kind: str
    location: str


@dataclass(frozen=True, slots=True)
class Scene:
    """A room: its fixtures, the object classes at home in it, and a place with nothing at hand to start from."""

    number: int
    fixtures: tuple[Fixture, ...]
    classes: tuple[str, ...]
    start: str


def mangle(name: str) -> str:
    """A simulator object id (`Mug|+01.84|-00.53|...`) as a PDDL symbol."""
    for character, word in (("|", "_bar_"), ("+", "_plus_"), ("-", "_minus_"), (".", "_dot_"), (",", "_comma_")):
        name = name.replace(character, word)
    return name


def random_position(rng: np.random.Generator) -> str:
    """A random `|x|y|z` part of an object id, in metres with two decimals."""
    x, z = rng.integers(-300, 301, size=2) / 100
    y = rng.integers(5, 221) / 100
    return f"|{x:+06.2f}|{y:+06.2f}|{z:+06.2f}"


def _location(x: int, z: int, turn: int, tilt: int) -> str:
    return mangle(f"loc|{x}|{z}|{turn}|{tilt}")


@lru_cache(maxsize=256)
def load_scene(number: int) -> Scene:
    """The room of scene `number`, the same in every game and process."""
    tables, layout = load_tables(), load_layout(number)
    rng = np.random.default_rng([_SEED, number])
    fixtures = []
    for name, (x, z, turn, tilt) in layout.receptacles.items():
        kind = name.rpartition("|")[2] if name.endswith("Basin") else name.partition("|")[0]
        # Poses lie on a grid of 25 cm and quarter turns; the ids count in those units.
        fixtures.append(
            Fixture(mangle(name), kind, _location(round(x * 4), round(z * 4), round(turn / 90), round(tilt)))
        )
    placed = {fixture.kind for fixture in fixtures}
    used = {fixture.location for fixture in fixtures}
    for kind in layout.classes:
        if kind in placed or kind not in tables.holds:
            continue
        for _ in range(_COPIES.get(kind, 1)):
            location = _free_location(rng, used)
            position = random_position(rng)
            owner = f"{kind.removesuffix('Basin')}{position}|{kind}" if kind.endswith("Basin") else f"{kind}{position}"
            fixtures.append(Fixture(mangle(owner), kind, location))
    fixtures = [fixture for fixture in fixtures if fixture.kind in tables.holds]
    return Scene(number, tuple(fixtures), layout.classes, _free_location(rng, used))


def _free_location(rng: np.random.Generator, used: set[str]) -> str:
    while True:
        x, z, turn = rng.integers(-12, 13), rng.integers(-12, 13), rng.integers(0, 4)
        location = _location(int(x), int(z), int(turn), 30)
        if location not in used:
            used.add(location)
            return location
