# SPDX-License-Identifier: Apache-2.0
"""The goal of a game, recognised from the condition in its problem file (not from file names)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from agent_system.environments.env_package.alfworld.pddl import Node, Problem, UnknownShapeError

__all__ = ["TASK_TYPES", "Goal", "parse_goal"]

TASK_TYPES: tuple[str, ...] = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""The six task types of the text games, in the data set's numbering."""

_STATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced"}
_STATIC = frozenset({"cleanable", "heatable", "coolable", "sliceable", "pickupable"})
_TASK_OF_STATE = {"clean": TASK_TYPES[2], "hot": TASK_TYPES[3], "cool": TASK_TYPES[4]}

Atom = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goal:
    """What wins a game.

    Either `count` different objects of `object_type` that are in all `states` lie in one receptacle of
    `receptacle_type`, or (`lamp_type` set) such an object is held where a switched-on lamp of that type stands.
    Types are lower case, with their `type` suffix; `required` are static predicates the object must have.
    """

    task_type: str
    object_type: str
    receptacle_type: str | None
    lamp_type: str | None
    count: int
    states: frozenset[str]
    required: frozenset[str]


def _flatten(node: Node, scope: dict[str, tuple[str, str]], counter: Iterator[int]) -> list[Atom]:
    """The atoms of a conjunction of existentials; every variable gets a unique name `type:number`."""
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise UnknownShapeError("the goal has an empty condition")
    head = node[0]
    if head == "and":
        return [atom for part in node[1:] for atom in _flatten(part, scope, counter)]
    if head == "exists":
        if len(node) != 3 or not isinstance(node[1], list):
            raise UnknownShapeError("the goal has a malformed quantifier")
        inner = dict(scope)
        pending: list[str] = []
        items = iter(node[1])
        for item in items:
            if item == "-":
                kind = next(items, None)
                for name in pending:
                    inner[name] = (f"{kind}", f"{kind}:{next(counter)}")
                pending.clear()
            else:
                pending.append(str(item))
        if pending:
            raise UnknownShapeError("a variable of the goal has no type")
        return _flatten(node[2], inner, counter)
    if head == "not" and len(node) == 2 and isinstance(node[1], list) and node[1] and node[1][0] == "=":
        return [("!=", *_names(node[1][1:], scope))]
    if head in ("not", "or", "forall", "imply", "when", "="):
        raise UnknownShapeError(f"the goal uses '{head}'")
    return [(head, *_names(node[1:], scope))]


def _names(nodes: list[Node], scope: dict[str, tuple[str, str]]) -> list[str]:
    names = []
    for node in nodes:
        if not isinstance(node, str) or (node.startswith("?") and node not in scope):
            raise UnknownShapeError("the goal has a nested or unbound argument")
        names.append(scope[node][1] if node in scope else node)
    return names


def _only(values: set[str], what: str) -> str:
    if len(values) != 1:
        raise UnknownShapeError(f"the goal names {len(values)} {what}")
    return next(iter(values))


def _object_part(atoms: set[Atom], variable: str) -> tuple[str, frozenset[str], frozenset[str], set[Atom]]:
    """Type, states and static needs of one object variable, and the atoms that say so."""
    used = {a for a in atoms if len(a) > 1 and a[1] == variable and (a[0] == "objecttype" or len(a) == 2)}
    types = {a[2] for a in used if a[0] == "objecttype"}
    unary = {a[0] for a in used if len(a) == 2}
    if not unary <= _STATES.keys() | _STATIC:
        raise UnknownShapeError("the goal asks for a state of an object that is not known")
    states = frozenset(_STATES[name] for name in unary & _STATES.keys())
    return _only(types, "object types"), states, frozenset(unary & _STATIC), used


def _place_goal(atoms: set[Atom], objects: list[str], receptacle: str) -> Goal:
    parts = [_object_part(atoms, variable) for variable in objects]
    if len({part[:3] for part in parts}) != 1:
        raise UnknownShapeError("the goal's objects differ in kind")
    object_type, states, required, _ = parts[0]
    explained: set[Atom] = set().union(*(part[3] for part in parts))
    explained |= {("inreceptacle", variable, receptacle) for variable in objects}
    types = {a[2] for a in atoms if a[:2] == ("receptacletype", receptacle)}
    receptacle_type = _only(types, "receptacle types")
    explained.add(("receptacletype", receptacle, receptacle_type))
    pairs = {frozenset(a[1:]) for a in atoms if a[0] == "!="}
    if pairs != {frozenset(pair) for pair in combinations(objects, 2)}:
        raise UnknownShapeError("the goal's objects are not all different")
    explained |= {a for a in atoms if a[0] == "!="}
    if explained != atoms:
        raise UnknownShapeError("the goal has a condition that is not known")
    if len(objects) == 1:
        named = sorted(states & _TASK_OF_STATE.keys())
        task_type = _TASK_OF_STATE[named[0]] if len(named) == 1 else TASK_TYPES[0]
    else:
        task_type = TASK_TYPES[5]
    return Goal(task_type, object_type, receptacle_type, None, len(objects), states, required)


def _look_goal(atoms: set[Atom], objects: list[str]) -> Goal:
    lamps = [v for v in objects if ("istoggled", v) in atoms]
    held = [v for v in objects if v not in lamps]
    if len(lamps) != 1 or len(held) != 1:
        raise UnknownShapeError("the goal does not name one lamp and one object")
    lamp, variable = lamps[0], held[0]
    object_type, states, required, explained = _object_part(atoms, variable)
    lamp_type = _only({a[2] for a in atoms if a[:2] == ("objecttype", lamp)}, "lamp types")
    receptacle = _only({a[2] for a in atoms if a[:2] == ("inreceptacle", lamp)}, "lamp places")
    location = _only({a[2] for a in atoms if a[:2] == ("receptacleatlocation", receptacle)}, "lamp locations")
    agents = {a[1] for a in atoms if a[0] in ("atlocation", "holds")}
    explained |= {
        ("objecttype", lamp, lamp_type),
        ("istoggled", lamp),
        ("inreceptacle", lamp, receptacle),
        ("receptacleatlocation", receptacle, location),
    }
    explained |= {("atlocation", agent, location) for agent in agents if ("atlocation", agent, location) in atoms}
    explained |= {("holds", agent, variable) for agent in agents if ("holds", agent, variable) in atoms}
    if ("toggleable", lamp) in atoms:
        explained.add(("toggleable", lamp))
    if explained != atoms or not {"atlocation", "holds"} <= {a[0] for a in atoms}:
        raise UnknownShapeError("the goal has a condition that is not known")
    return Goal(TASK_TYPES[1], object_type, None, lamp_type, 1, states, required)


def parse_goal(problem: Problem) -> Goal:
    """Recognise the goal of `problem`.

    Raises:
        UnknownShapeError: the condition is none of the shapes described at `Goal`.
    """
    atoms = set(_flatten(problem.goal, {}, iter(range(1_000_000))))
    variables = {name for atom in atoms for name in atom[1:] if ":" in name}
    objects = sorted(v for v in variables if v.startswith("object:"))
    receptacles = sorted(v for v in variables if v.startswith("receptacle:"))
    if any(atom[0] == "istoggled" for atom in atoms):
        return _look_goal(atoms, objects)
    if len(receptacles) != 1 or not objects or len(objects) + 1 != len(variables):
        raise UnknownShapeError("the goal does not name objects in one receptacle")
    return _place_goal(atoms, objects, receptacles[0])
