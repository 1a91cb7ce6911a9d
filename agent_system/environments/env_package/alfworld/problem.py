# SPDX-License-Identifier: Apache-2.0
"""Game files: from `game.tw-pddl` to the constant facts of one game."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent_system.environments.env_package.alfworld.file_cache import FileCache
from agent_system.environments.env_package.alfworld.goal import Goal, parse_goal
from agent_system.environments.env_package.alfworld.pddl import Problem, UnknownShapeError, parse_problem
from verl.utils.errors import UserError

__all__ = [
    "GameData",
    "GameFile",
    "SimState",
    "build_game",
    "display_names",
    "is_known_release",
    "load_game",
    "read_game_file",
    "task_of_grammar",
]

logger = logging.getLogger(__name__)

# The simulator reproduces exactly these texts: the domain and the grammar (with its placeholder task) of alfworld
# 0.4.2, which the games of its data release carry too. Anything else is run by the interpreter.
KNOWN_DOMAINS = frozenset({"f1473041ed01"})
KNOWN_GRAMMARS = frozenset({"c5b22f0f7330"})
_TASK_RULE = re.compile(r'("rhs": )"Your task is to: ((?:[^"\\\n]|\\.)*)\."')
_PLACEHOLDER = r'\1"Your task is to: UNKNOWN GOAL."'
# Characters with a meaning in the text grammar: a task that contains one is not a plain sentence.
_GRAMMAR_SYMBOLS = frozenset("#{}[]|\\")
# Games a process keeps, of 0.1-0.4 MB each: loading one again takes milliseconds.
_CACHE_SIZE = 64


class SimState(NamedTuple):
    """Everything that changes during a game; indices are those of `GameData`, sets of indices are bit masks.

    `at[o]`: locations where object o counts as lying (slicing reads it); `left[o]`: receptacles it was taken from
    and is not in (only the text of `look` reads it).
    """

    location: int
    held: int
    opened: int
    contents: tuple[tuple[int, ...], ...]
    at: tuple[int, ...]
    left: tuple[int, ...]
    clean: int
    hot: int
    cool: int
    sliced: int
    toggled: int
    won: bool


@dataclass(frozen=True, slots=True)
class GameData:
    """The constant facts of one game. Receptacles, objects and locations are indexed in the order of their ids."""

    key: str
    """Hash of the problem: states of different games never share a `state_key`."""
    task: str
    goal: Goal
    receptacles: tuple[str, ...]
    objects: tuple[str, ...]
    receptacle_types: tuple[str, ...]
    object_types: tuple[frozenset[str], ...]
    location_of: tuple[int, ...]
    receptacles_at: tuple[tuple[int, ...], ...]
    openable: int
    pickupable: int
    toggleable: int
    sliceable: int
    cleanable: int
    heatable: int
    coolable: int
    fits: tuple[int, ...]
    """For each receptacle, the objects its type can contain."""
    inside: tuple[tuple[int, ...] | None, ...]
    """For each object that is itself a receptacle, what is in it (never changes); None for the others."""
    goal_objects: int
    goal_receptacles: tuple[int, ...]
    goal_lamps: int
    goto: tuple[tuple[str, ...], ...]
    """For each location, the sorted `go to` commands."""
    receptacle_index: dict[str, int]
    object_index: dict[str, int]
    start: SimState


class GameFile(NamedTuple):
    """The texts of a game file that matter here."""

    domain: str
    grammar: str
    problem: str


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def read_game_file(path: str | Path) -> GameFile:
    """Read a game file.

    Raises:
        UserError: the file is missing, is not JSON, or lacks one of the three texts (of whole Unicode characters).
    """
    try:
        with open(path, encoding="utf-8") as handle:
            data = json.load(handle)
        file = GameFile(data["pddl_domain"], data["grammar"], data["pddl_problem"])
        if not all(isinstance(text, str) for text in file):
            raise TypeError("domain, grammar and problem must be texts")
        for text in file:
            text.encode("utf-8")  # JSON can spell half surrogates, which no file or hash can hold
        return file
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no {error} in it" if isinstance(error, KeyError) else f"{error}"
        raise UserError(
            f"The game file {path} cannot be read ({reason}); download the ALFWorld data again "
            "or point the task at another game."
        ) from error


def task_of_grammar(grammar: str) -> tuple[str, str]:
    """The task sentence of a game's grammar (with its full stop) and the hash of the grammar without it.

    Raises:
        UnknownShapeError: there is not exactly one task rule, or its text is not a plain sentence.
    """
    rules = _TASK_RULE.findall(grammar)
    if len(rules) != 1:
        raise UnknownShapeError("the grammar does not have exactly one task rule")
    try:
        text: str = json.loads(f'"{rules[0][1]}"')
    except ValueError as error:
        raise UnknownShapeError("the task is not a JSON string") from error
    if _GRAMMAR_SYMBOLS & set(text) or "\n" in text:
        raise UnknownShapeError("the task is not a plain sentence")
    return f"Your task is to: {text}.", _digest(_TASK_RULE.sub(_PLACEHOLDER, grammar))


def is_known_release(domain: str, grammar: str) -> bool:
    """Whether the simulator reproduces games with this domain and this grammar (whatever its task)."""
    try:
        return _digest(domain) in KNOWN_DOMAINS and task_of_grammar(grammar)[1] in KNOWN_GRAMMARS
    except UnknownShapeError:
        return False


def display_names(ids: list[str]) -> dict[str, str]:
    """Names as players see them: within a class, numbers are handed out downwards in the order of ids. Ids without a
    place in them (`_bar_`) are left out."""
    classes = {}
    for name in sorted(ids):
        head, bar, _ = name.partition("_bar_")
        if bar:
            classes[name] = head + "basin" if "basin" in name else head
    remaining = Counter(classes.values())
    names = {}
    for name, kind in classes.items():
        names[name] = f"{kind} {remaining[kind]}"
        remaining[kind] -= 1
    return names


_ACTIVE = frozenset(
    {"atlocation", "receptacleatlocation", "objectatlocation", "openable", "opened", "inreceptacle",
     "isreceptacleobject", "inreceptacleobject", "receptacletype", "cancontain", "objecttype", "holds", "holdsany",
     "isclean", "cleanable", "ishot", "heatable", "iscool", "coolable", "pickupable", "toggleable", "istoggled",
     "sliceable", "issliced"}
)  # fmt: skip
# Predicates that no action of the domain and no text reads.
_INERT = frozenset(
    {"wasinreceptacle", "checked", "examined", "isreceptacleobjectfull", "holdsanyreceptacleobject", "full",
     "moveable", "ison"}
)  # fmt: skip


class _Index:
    """Facts of a problem by predicate, with the numbering of objects, receptacles and locations."""

    def __init__(self, problem: Problem) -> None:
        self.by_predicate: dict[str, list[tuple[str, ...]]] = {}
        for fact in dict.fromkeys(problem.facts):
            if fact[0] not in _ACTIVE | _INERT:
                raise UnknownShapeError(f"the predicate {fact[0]} is not known")
            self.by_predicate.setdefault(fact[0], []).append(fact[1:])
        used = {argument for fact in problem.facts for argument in fact[1:]}
        if not used <= problem.objects.keys():
            raise UnknownShapeError("a fact names an object that is not declared")
        self.names = display_names(list(used))
        kinds: dict[str, list[str]] = {"object": [], "receptacle": [], "location": [], "agent": []}
        for name in sorted(used):
            if problem.objects[name] in kinds:
                kinds[problem.objects[name]].append(name)
        self.agents = kinds["agent"]
        self.objects = {name: i for i, name in enumerate(kinds["object"])}
        self.receptacles = {name: i for i, name in enumerate(kinds["receptacle"])}
        self.locations = {name: i for i, name in enumerate(kinds["location"])}
        if len(self.agents) != 1:
            raise UnknownShapeError("the game does not have exactly one agent")
        if not all(name in self.names for name in (*self.objects, *self.receptacles)):
            raise UnknownShapeError("an object's id has no place in it")

    def facts(self, predicate: str) -> list[tuple[str, ...]]:
        return self.by_predicate.get(predicate, [])

    def mask(self, predicate: str, of: dict[str, int]) -> int:
        """Bit mask of the objects or receptacles with a unary predicate (others cannot carry it)."""
        bits = 0
        for (name,) in self.facts(predicate):
            if name not in of:
                raise UnknownShapeError(f"{predicate} is said of {name}, which cannot have it")
            bits |= 1 << of[name]
        return bits


def _start(index: _Index) -> SimState:
    positions = {location for _, location in index.facts("atlocation")}
    held = [index.objects[name] for _, name in index.facts("holds")]
    if len(positions) != 1 or len(held) > 1 or bool(held) != bool(index.facts("holdsany")):
        raise UnknownShapeError("the agent's start is not one place with at most one object in hand")
    contents: list[list[int]] = [[] for _ in index.receptacles]
    for name, receptacle in index.facts("inreceptacle"):
        contents[index.receptacles[receptacle]].append(index.objects[name])
    at = [0] * len(index.objects)
    for name, location in index.facts("objectatlocation"):
        at[index.objects[name]] |= 1 << index.locations[location]
    return SimState(
        location=index.locations[positions.pop()],
        held=held[0] if held else -1,
        opened=index.mask("opened", index.receptacles),
        contents=tuple(tuple(sorted(inside)) for inside in contents),
        at=tuple(at),
        left=(0,) * len(index.objects),
        clean=index.mask("isclean", index.objects),
        hot=index.mask("ishot", index.objects),
        cool=index.mask("iscool", index.objects),
        sliced=index.mask("issliced", index.objects),
        toggled=index.mask("istoggled", index.objects),
        won=False,
    )


def _types(index: _Index) -> tuple[tuple[str, ...], tuple[frozenset[str], ...]]:
    receptacle_types: dict[str, str] = {}
    for name, kind in index.facts("receptacletype"):
        if receptacle_types.setdefault(name, kind) != kind:
            raise UnknownShapeError(f"{name} has two types")
    object_types: dict[str, set[str]] = {}
    for name, kind in index.facts("objecttype"):
        object_types.setdefault(name, set()).add(kind)
    return (
        tuple(receptacle_types.get(name, "") for name in index.receptacles),
        tuple(frozenset(object_types.get(name, ())) for name in index.objects),
    )


def _inside(index: _Index) -> tuple[tuple[int, ...] | None, ...]:
    """For each object that is itself a receptacle, what is in it; None for the others."""
    inside: list[tuple[int, ...] | None] = [None] * len(index.objects)
    for (name,) in index.facts("isreceptacleobject"):
        inner = [index.objects[i] for i, outer in index.facts("inreceptacleobject") if outer == name != i]
        inside[index.objects[name]] = tuple(sorted(inner))
    return tuple(inside)


def build_game(problem_text: str, task: str) -> GameData:
    """The constant facts of a game whose domain and grammar are known.

    Raises:
        UnknownShapeError: the problem is outside what the simulator knows.
    """
    problem = parse_problem(problem_text)
    goal = parse_goal(problem)
    index = _Index(problem)
    receptacle_types, object_types = _types(index)
    location_of = [-1] * len(index.receptacles)
    at: list[list[int]] = [[] for _ in index.locations]
    for name, location in index.facts("receptacleatlocation"):
        receptacle = index.receptacles[name]
        if location_of[receptacle] >= 0:
            raise UnknownShapeError(f"{name} is at two locations")
        location_of[receptacle] = index.locations[location]
        at[index.locations[location]].append(receptacle)
    can_contain = set(index.facts("cancontain"))
    objects, receptacles = list(index.objects), list(index.receptacles)
    static = {
        predicate: index.mask(predicate, index.objects)
        for predicate in ("pickupable", "toggleable", "sliceable", "cleanable", "heatable", "coolable")
    }
    eligible = [i for i in range(len(objects)) if goal.object_type in object_types[i]]
    lamps = [i for i in range(len(objects)) if goal.lamp_type in object_types[i] and static["toggleable"] >> i & 1]
    names = [index.names[name] for name in receptacles]
    return GameData(
        key=_digest(problem_text),
        task=task,
        goal=goal,
        receptacles=tuple(names),
        objects=tuple(index.names[name] for name in objects),
        receptacle_types=receptacle_types,
        object_types=object_types,
        location_of=tuple(location_of),
        receptacles_at=tuple(tuple(sorted(here)) for here in at),
        openable=index.mask("openable", index.receptacles),
        pickupable=static["pickupable"],
        toggleable=static["toggleable"],
        sliceable=static["sliceable"],
        cleanable=static["cleanable"],
        heatable=static["heatable"],
        coolable=static["coolable"],
        fits=tuple(
            sum(1 << o for o, kinds in enumerate(object_types) if any((rtype, k) in can_contain for k in kinds))
            for rtype in receptacle_types
        ),
        inside=_inside(index),
        goal_objects=sum(1 << i for i in eligible if all(static[need] >> i & 1 for need in goal.required)),
        goal_receptacles=tuple(r for r, kind in enumerate(receptacle_types) if kind == goal.receptacle_type),
        goal_lamps=sum(1 << i for i in lamps),
        goto=tuple(
            tuple(sorted(f"go to {name}" for r, name in enumerate(names) if location_of[r] not in (-1, here)))
            for here in range(len(index.locations))
        ),
        receptacle_index={name: i for i, name in enumerate(names)},
        object_index={index.names[name]: i for i, name in enumerate(objects)},
        start=_start(index),
    )


_warned: set[tuple[str, str]] = set()


def _warn_unknown(path: str | Path, file: GameFile, reason: UnknownShapeError) -> None:
    """Say once per domain and reason that games are not those of the known release."""
    kind = (_digest(file.domain), str(reason))
    if kind not in _warned:
        _warned.add(kind)
        logger.warning(
            "%s and games like it are not of the known release (%s): they run in the interpreter, some hundred times "
            "slower than the simulator, and old data may use other verbs than alfworld 0.4.2",
            path,
            reason,
        )


def load_game(path: str | Path) -> GameData | None:
    """The constant facts of a game file, cached per process by path, time and size; None if the simulator does not
    know it.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    return _cache.get(path)


def _load(path: str | Path) -> GameData | None:
    file = read_game_file(path)
    try:
        if not is_known_release(file.domain, file.grammar):
            raise UnknownShapeError("its domain or grammar is not that of the known release")
        return build_game(file.problem, task_of_grammar(file.grammar)[0])
    except UnknownShapeError as reason:
        _warn_unknown(path, file, reason)
        return None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        # Known domain and grammar, but facts that contradict the declarations: no engine can run that.
        raise UserError(
            f"The game file {path} is damaged: its problem does not fit its domain ({error!r}); download or generate "
            "the data again, or remove this game."
        ) from error


_cache = FileCache(_load, _CACHE_SIZE)
