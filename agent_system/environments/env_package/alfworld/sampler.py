# SPDX-License-Identifier: Apache-2.0
"""Generated games: real room layouts, random objects in plausible places, a task, each game proven winnable."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from agent_system.environments.env_package.alfworld.oracle import NoPlanError, scripted_plan
from agent_system.environments.env_package.alfworld.package_data import Tables, load_layout, load_tables
from agent_system.environments.env_package.alfworld.problem import build_game
from agent_system.environments.env_package.alfworld.scenes import Fixture, Scene, load_scene, mangle, random_position
from agent_system.environments.env_package.alfworld.simulator import Simulator
from verl.utils.errors import UserError

__all__ = ["GameSpec", "GeneratedGame", "Sampler"]

_ATTEMPTS = 500
_MAX_INSTANCES = 3
_TOOL = {TASK_TYPES[2]: "SinkBasin", TASK_TYPES[3]: "Microwave", TASK_TYPES[4]: "Fridge"}
_ABILITY = {TASK_TYPES[2]: "Cleanable", TASK_TYPES[3]: "Heatable", TASK_TYPES[4]: "Coolable"}
_PREDICATES = {"Cleanable": "cleanable", "Heatable": "heatable", "Coolable": "coolable", "Sliceable": "sliceable"}


@dataclass(frozen=True, slots=True)
class GameSpec:
    """What a game is about; class names in the package's spelling, "" where a field does not apply."""

    task_type: str
    object_class: str
    receptacle_class: str
    lamp_class: str
    scene: int


@dataclass(frozen=True, slots=True)
class GeneratedGame:
    """A game ready to be written: its spec, texts, task sentence without "Your task is to", and a winning plan."""

    spec: GameSpec
    problem: str
    grammar: str
    sentence: str
    plan: tuple[str, ...]


@dataclass(slots=True)
class _Room:
    """A room while it is filled: chosen fixtures, and objects as (id, class, fixture)."""

    scene: Scene
    fixtures: list[Fixture]
    objects: list[tuple[str, str, Fixture]] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def put(self, kind: str, fixture: Fixture, rng: np.random.Generator) -> None:
        name = f"{kind}{random_position(rng)}"
        while name in self.taken:
            name = f"{kind}{random_position(rng)}"
        self.taken.add(name)
        self.objects.append((mangle(name), kind, fixture))


class Sampler:
    """Draws games, one generator per game, so that game i does not depend on how many games are drawn.

    Args:
        max_receptacles: keep at most this many receptacles of a room (at least 4), those that the task needs first.
        max_objects: at most this many objects in a room besides those of the task and lamps.
        max_object_classes: use only so many object classes over all games, the commonest of each room kind in turn.
    """

    def __init__(
        self, max_receptacles: int | None = None, max_objects: int | None = None, max_object_classes: int | None = None
    ) -> None:
        if max_receptacles is not None and max_receptacles < 4:
            raise UserError(f"max_receptacles={max_receptacles} is too small for a game; set it to at least 4.")
        if max_objects is not None and max_objects < 0:
            raise UserError(f"max_objects={max_objects} is negative; set it to 0 or more.")
        if max_object_classes is not None and max_object_classes < 4:
            raise UserError(f"max_object_classes={max_object_classes} is too small; set it to at least 4.")
        self.tables = load_tables()
        self.max_receptacles = max_receptacles
        self.max_objects = max_objects
        self.classes = _chosen_classes(self.tables, max_object_classes)

    def sample(self, task_type: str, scenes: frozenset[int], rng: np.random.Generator) -> GeneratedGame | None:
        """Draw one game of a task type in one of the scenes; it is won by its plan, and not before the plan's end.

        None when no scene suits the task, or no game was found in many attempts.
        """
        pool = [s for room in self.tables.rooms[task_type] for s in self.tables.scenes[room] if s in scenes]
        for _ in range(_ATTEMPTS if pool else 0):
            scene = load_scene(pool[rng.integers(len(pool))])
            game = self._try(task_type, scene, rng)
            if game is not None:
                return game
        return None

    def _try(self, task_type: str, scene: Scene, rng: np.random.Generator) -> GeneratedGame | None:
        spec = self._spec(task_type, scene, rng)
        room = None if spec is None else self._furnish(spec, scene, rng)
        if spec is None or room is None:
            return None
        condition, sentences = self.tables.goals[task_type]
        names = {"obj": spec.object_class, "recep": spec.receptacle_class, "toggle": spec.lamp_class}
        sentence = sentences[rng.integers(len(sentences))].format(**{k: v.lower() for k, v in names.items()})
        problem = _problem_text(self.tables, room, condition.format(**names))
        plan = _prove(problem)
        if plan is None:
            return None
        return GeneratedGame(spec, problem, self.tables.grammar.replace("UNKNOWN GOAL", sentence), sentence, plan)

    def _spec(self, task_type: str, scene: Scene, rng: np.random.Generator) -> GameSpec | None:
        holds = self.tables.holds
        kinds = sorted({fixture.kind for fixture in scene.fixtures})
        ability = _ABILITY.get(task_type)
        if ability is not None and _TOOL[task_type] not in kinds:
            return None
        lamps = [c for c in scene.classes if c in self.tables.abilities["Toggleable"]]
        look = task_type == TASK_TYPES[1]
        choices = []
        for kind in scene.classes:
            if kind not in self.classes or (ability is not None and kind not in self.tables.abilities[ability]):
                continue
            homes = [home for home in kinds if kind in holds[home]]
            if look:
                choices += [(kind, "", lamp) for lamp in lamps if homes]
            else:
                # Something must stay outside the target, or the game would be won at the start.
                choices += [(kind, home, "") for home in homes if len(homes) > 1]
        if not choices:
            return None
        return GameSpec(task_type, *choices[rng.integers(len(choices))], scene.number)

    def _furnish(self, spec: GameSpec, scene: Scene, rng: np.random.Generator) -> _Room | None:
        holds = self.tables.holds
        order = [scene.fixtures[i] for i in rng.permutation(len(scene.fixtures))]
        needed: list[Fixture] = []

        def need(suitable: list[Fixture]) -> Fixture | None:
            # Prefer what is needed anyway, so that small rooms stay small.
            found = next((f for f in needed if f in suitable), None) or next(iter(suitable), None)
            if found is not None and found not in needed:
                needed.append(found)
            return found

        sources = [f for f in order if spec.object_class in holds[f.kind] and f.kind != spec.receptacle_class]
        if not sources:
            return None
        needed.append(sources[0])
        if spec.receptacle_class:
            need([f for f in order if f.kind == spec.receptacle_class])
        if spec.task_type in _TOOL:
            need([f for f in order if f.kind == _TOOL[spec.task_type]])
        lamp_place = None
        if spec.lamp_class:
            lamp_place = need([f for f in order if f.kind not in self.tables.openable])
            if lamp_place is None:
                return None
        limit = self.max_receptacles or len(order)
        kept = set(needed) | set([f for f in order if f not in needed][: max(0, limit - len(needed))])
        room = _Room(scene, [f for f in scene.fixtures if f in kept])
        self._fill(room, spec, lamp_place, rng)
        return room

    def _fill(self, room: _Room, spec: GameSpec, lamp_place: Fixture | None, rng: np.random.Generator) -> None:
        holds, abilities = self.tables.holds, self.tables.abilities
        sources = [f for f in room.fixtures if spec.object_class in holds[f.kind] and f.kind != spec.receptacle_class]
        copies = 2 + int(rng.integers(2)) if spec.task_type == TASK_TYPES[5] else 1 + int(rng.random() < 0.15)
        for _ in range(copies):
            room.put(spec.object_class, _home(sources, rng), rng)
        surfaces = [f for f in room.fixtures if f.kind not in self.tables.openable]
        for lamp in sorted(abilities["Toggleable"] & set(room.scene.classes)):
            if lamp == spec.lamp_class and lamp_place is not None:
                room.put(lamp, lamp_place, rng)
            elif surfaces and rng.random() < 0.5:
                room.put(lamp, surfaces[rng.integers(len(surfaces))], rng)
        others = [c for c in room.scene.classes if c in self.classes and c != spec.object_class]
        number = int(rng.integers(len(room.fixtures) // 2, 2 * len(room.fixtures) + 1))
        counts: Counter[str] = Counter()
        for _ in range(number if self.max_objects is None else min(number, self.max_objects)):
            if not others:
                break
            kind = others[rng.integers(len(others))]
            homes = [f for f in room.fixtures if kind in holds[f.kind]]
            if homes and counts[kind] < _MAX_INSTANCES:
                counts[kind] += 1
                room.put(kind, _home(homes, rng), rng)


def _home(fixtures: list[Fixture], rng: np.random.Generator) -> Fixture:
    """A random fixture, its class first: twenty cabinets do not attract twenty times the things of one table."""
    kinds = sorted({fixture.kind for fixture in fixtures})
    kind = kinds[rng.integers(len(kinds))]
    same = [fixture for fixture in fixtures if fixture.kind == kind]
    return same[rng.integers(len(same))]


def _chosen_classes(tables: Tables, limit: int | None) -> frozenset[str]:
    storable = frozenset().union(*tables.holds.values()) - tables.abilities["Toggleable"]
    ranked: list[list[str]] = []
    for room in sorted(tables.scenes):
        counts = Counter(c for number in tables.scenes[room] for c in load_layout(number).classes if c in storable)
        ranked.append([kind for kind, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))])
    if limit is None:
        return frozenset().union(*ranked)
    chosen: dict[str, None] = {}
    for place in range(max(len(names) for names in ranked)):
        for names in ranked:
            if place < len(names) and len(chosen) < limit:
                chosen[names[place]] = None
    return frozenset(chosen)


def _prove(problem: str) -> tuple[str, ...] | None:
    """The scripted plan, if it wins the game with its last command and not earlier; else None."""
    data = build_game(problem, "")
    try:
        plan = scripted_plan(data)
    except NoPlanError:
        return None
    simulator = Simulator(data)
    simulator.reset()
    for command in plan:
        if simulator.won or command not in simulator.commands():
            return None
        simulator.step(command)
    return tuple(plan) if simulator.won else None


def _problem_text(tables: Tables, room: _Room, condition: str) -> str:
    fixture_kinds = sorted({f.kind for f in room.fixtures})
    object_kinds = sorted({kind for _, kind, _ in room.objects})
    locations = sorted({f.location for f in room.fixtures} | {room.scene.start})
    objects = ["agent1 - agent"]
    objects += [f"{kind}Type - otype" for kind in object_kinds] + [f"{kind}Type - rtype" for kind in fixture_kinds]
    objects += [f"{name} - object" for name, _, _ in sorted(room.objects)]
    objects += [f"{name} - receptacle" for name in sorted(f.name for f in room.fixtures)]
    objects += [f"{name} - location" for name in locations]
    facts = [f"atLocation agent1 {room.scene.start}"]
    for fixture in room.fixtures:
        facts.append(f"receptacleType {fixture.name} {fixture.kind}Type")
        facts.append(f"receptacleAtLocation {fixture.name} {fixture.location}")
        if fixture.kind in tables.openable:
            facts.append(f"openable {fixture.name}")
    facts += [f"canContain {f}Type {o}Type" for f in fixture_kinds for o in object_kinds if o in tables.holds[f]]
    for name, kind, fixture in room.objects:
        facts += [f"objectType {name} {kind}Type", f"inReceptacle {name} {fixture.name}"]
        facts.append(f"objectAtLocation {name} {fixture.location}")
        lamp = kind in tables.abilities["Toggleable"]
        facts.append(f"{'toggleable' if lamp else 'pickupable'} {name}")
        if kind in tables.movable_receptacles:
            facts.append(f"isReceptacleObject {name}")
        facts += [f"{word} {name}" for able, word in _PREDICATES.items() if kind in tables.abilities[able]]
    body = "\n".join(f"    {line}" for line in objects)
    init = "\n".join(f"    ({fact})" for fact in facts)
    title = f"plan_{room.scene.number}_{len(room.objects)}"
    return f"(define (problem {title})\n(:domain alfred)\n(:objects\n{body}\n)\n(:init\n{init}\n)\n{condition}\n"
