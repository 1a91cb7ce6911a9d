# SPDX-License-Identifier: Apache-2.0
"""The constant part of a game file of any domain: its translation as bit masks, its grammar, its objects' names."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from agent_system.environments.env_package.alfworld.file_cache import FileCache
from agent_system.environments.env_package.alfworld.problem import GameFile, display_names, read_game_file
from agent_system.environments.env_package.alfworld.textgen import Entity, GrammarError, TextGrammar, Variable
from agent_system.environments.env_package.alfworld.translation import (
    Translation,
    TranslationError,
    load_translation,
)
from verl.utils.errors import UserError

__all__ = ["Action", "InterpretedGame", "InterpreterState", "load_interpreted"]

# Games a process keeps, of 1-4 MB each.
_CACHE_SIZE = 16

Signature = tuple[str, tuple[str, ...]]
"""Predicate and the types of its arguments."""


class InterpreterState(NamedTuple):
    """Everything that changes during a game, as bit masks over the translation's atoms."""

    true: int
    """The state."""
    recorded: int
    """Atoms in the record of facts that texts are made from."""
    denied: int
    """Atoms whose negation is in the record."""


class Action(NamedTuple):
    """An operator, ready to run."""

    name: str
    arguments: tuple[str, ...]
    effects: tuple[tuple[int, int, int, int], ...]
    """(bit, its value afterwards: the bit or 0, condition mask, condition wanted)"""


def _masks(literals: tuple[int, ...]) -> tuple[int, int]:
    """(bits that a condition looks at, the value they must have)."""
    mask = wanted = 0
    for literal in literals:
        bit = 1 << (literal >> 1)
        mask |= bit
        wanted |= 0 if literal & 1 else bit
    return mask, wanted


def _names(ids: list[str]) -> dict[str, str]:
    """Object id -> name shown to players; an id without a place keeps its text and, as in the stock engine, a space
    after it."""
    names = display_names(ids)
    for name in ids:
        if name not in names:
            text = name
            for word, character in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
                text = text.replace(word, character)
            names[name] = f"{text} "
    return names


class InterpretedGame:
    """What never changes in a game; slots that play the same file share it.

    Raises:
        TranslationError, GrammarError: the file cannot be run.
    """

    def __init__(self, file: GameFile) -> None:
        translation = load_translation(file.domain, file.problem)
        self.key = hashlib.sha256("\0".join(file).encode("utf-8")).hexdigest()[:16]
        self.grammar = TextGrammar(file.grammar)
        self.parameters = translation.parameters
        missing = {op.name for op in translation.operators} - self.grammar.templates.keys()
        if missing:
            raise GrammarError(f"the grammar has no action {', '.join(sorted(missing))}")
        self.goal = _masks(translation.goal)
        self.actions = tuple(
            Action(
                op.name,
                op.arguments,
                tuple((*_assignment(effect), *_masks(when)) for effect, when in op.effects),
            )
            for op in translation.operators
        )
        self.tests = _grouped_tests(translation)
        """(bit, ((number of an action, mask, wanted), ...)): where the state has the bit (or it is 0), those actions
        are applicable for which `state & mask == wanted`."""
        self._build_facts(translation)
        self._build_axioms(translation)
        true = self.settle(sum(1 << number for number in translation.start))
        self.start = InterpreterState(true, true, 0)
        self.entities = self._entities()
        texts = self.grammar.predicates_read()
        self.read = _relevant(translation, texts) & ~self._derived
        self.drifting = _conditionally_set(translation, texts)
        self._fluents = frozenset(atom[0] for atom in translation.atoms)
        self._constant: dict[str, bool] = {}
        self.commands: dict[int, str] = {}
        """Number of an action -> its command, where that depends on the arguments alone."""

    def _build_facts(self, translation: Translation) -> None:
        def typed(names: tuple[str, ...]) -> tuple[Variable, ...]:
            unknown = [name for name in names if name not in translation.objects]
            if unknown:
                raise TranslationError(f"a fact names {unknown[0]}, which is not declared")
            return tuple((name, translation.objects[name]) for name in names)

        self.atoms = tuple(typed(atom[1:]) for atom in translation.atoms)
        self.number_of = {(atom[0], typed(atom[1:])): number for number, atom in enumerate(translation.atoms)}
        self.fluent: dict[Signature, int] = {}
        """Signature -> bits of its atoms."""
        for (predicate, arguments), number in self.number_of.items():
            signature = (predicate, tuple(kind for _, kind in arguments))
            self.fluent[signature] = self.fluent.get(signature, 0) | 1 << number
        self.static: dict[Signature, dict[tuple[Variable, ...], None]] = {}
        """Signature -> its unchanging facts, in order."""
        for fact in translation.static:
            arguments = typed(fact[1:])
            self.static.setdefault((fact[0], tuple(kind for _, kind in arguments)), {})[arguments] = None
        self._subtypes = _subtypes(translation)
        self._signatures: dict[Signature, list[Signature]] = {}

    def _build_axioms(self, translation: Translation) -> None:
        layers: dict[int, list[tuple[int, int, int]]] = {}
        self._derived = 0
        for layer, number, condition in translation.axioms:
            layers.setdefault(layer, []).append((1 << number, *_masks(condition)))
            self._derived |= 1 << number
        self._layers = tuple(tuple(layers[layer]) for layer in sorted(layers))

    def _entities(self) -> dict[str, Entity]:
        """The objects that some fact names at the start; the stock engine knows no others."""
        named = {item for facts in self.static.values() for arguments in facts for item in arguments}
        named |= {item for n, arguments in enumerate(self.atoms) if self.start.true >> n & 1 for item in arguments}
        names = _names([name for name, _ in named])
        return {name: Entity(name, kind, names[name]) for name, kind in named}

    def settle(self, state: int) -> int:
        """The state with its derived atoms worked out, layer by layer."""
        state &= ~self._derived
        for rules in self._layers:
            before = -1
            while state != before:
                before = state
                for bit, mask, wanted in rules:
                    if state & mask == wanted:
                        state |= bit
        return state

    def signatures(self, predicate: str, types: tuple[str, ...]) -> list[Signature]:
        """The signatures, without `not_`, whose facts answer a query over these types; in the query's order."""
        key = (predicate, types)
        if key not in self._signatures:
            plain = predicate.removeprefix("not_")
            found = [(plain, kinds) for kinds in self._subtypes(types)]
            self._signatures[key] = [item for item in found if item in self.fluent or item in self.static]
        return self._signatures[key]

    def is_constant(self, action: str) -> bool:
        """Whether the command of an action depends on its arguments alone.

        Raises:
            GrammarError: a rule that its text may need cannot be read.
        """
        if action not in self._constant:
            read = self.grammar.reads(self.grammar.templates[action])
            self._constant[action] = not read & self._fluents
        return self._constant[action]


def _grouped_tests(translation: Translation) -> list[tuple[int, tuple[tuple[int, int, int], ...]]]:
    """Actions by one fact that they need, the one that most actions need (where the agent is, in most domains), so
    that few of them have to be looked at."""
    needed = Counter(literal for op in translation.operators for literal in op.condition if not literal & 1)
    groups: dict[int, list[tuple[int, int, int]]] = {}
    for number, op in enumerate(translation.operators):
        facts = [literal for literal in op.condition if not literal & 1]
        bit = 1 << (max(facts, key=lambda fact: (needed[fact], fact)) >> 1) if facts else 0
        groups.setdefault(bit, []).append((number, *_masks(op.condition)))
    return [(bit, tuple(tests)) for bit, tests in groups.items()]


def _assignment(literal: int) -> tuple[int, int]:
    bit = 1 << (literal >> 1)
    return bit, 0 if literal & 1 else bit


def _subtypes(translation: Translation) -> Callable[[tuple[str, ...]], list[tuple[str, ...]]]:
    """Types of a query -> the combinations of their subtypes, in the order in which the stock engine tries them."""
    from textworld.logic import Type, TypeHierarchy

    hierarchy = TypeHierarchy()
    added: set[str] = set()
    for name, parents in translation.types:
        # A domain may declare `object`, which exists already: the first one counts.
        if name not in added:
            added.add(name)
            hierarchy.add(Type(name, parents))

    def combinations(types: tuple[str, ...]) -> list[tuple[str, ...]]:
        known = [hierarchy.get(name) for name in types]
        return [tuple(kind.name for kind in kinds) for kinds in hierarchy.multi_subtypes(known)]

    return combinations


def _relevant(translation: Translation, texts: frozenset[str]) -> int:
    """Bits of the atoms on which a later command, the goal or a text can depend."""
    atoms = translation.atoms
    read = {literal >> 1 for op in translation.operators for literal in op.condition}
    read |= {literal >> 1 for literal in translation.goal}
    predicates = texts | {atoms[number][0] for number in read}
    # What decides whether something that matters changes matters too.
    causes = {
        (atoms[effect >> 1][0], atoms[literal >> 1][0])
        for op in translation.operators
        for effect, when in op.effects
        for literal in when
    }
    causes |= {(atoms[head][0], atoms[literal >> 1][0]) for _, head, body in translation.axioms for literal in body}
    size = -1
    while size != len(predicates):
        size = len(predicates)
        predicates |= {cause for changed, cause in causes if changed in predicates}
    return sum(1 << number for number, atom in enumerate(atoms) if atom[0] in predicates)


def _conditionally_set(translation: Translation, texts: frozenset[str]) -> int:
    """Bits of the atoms that texts read and whose record can differ from the state."""
    found = 0
    for op in translation.operators:
        for effect, when in op.effects:
            if when and translation.atoms[effect >> 1][0] in texts:
                found |= 1 << (effect >> 1)
    return found


@contextmanager
def _without_collection() -> Iterator[None]:
    """Grounding makes some hundred thousand objects that live on; looking for garbage among them doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_interpreted(path: str | Path) -> InterpretedGame:
    """The constant part of a game file, cached per process by path, time and size (and its translation on disk).

    Raises:
        UserError: the file is missing or unreadable, cannot be run, or the packages that read it are not installed.
    """
    return _cache.get(path)


def _load(path: str | Path) -> InterpretedGame:
    file = read_game_file(path)
    try:
        with _without_collection():
            return InterpretedGame(file)
    except (TranslationError, GrammarError) as error:
        raise UserError(
            f"The game file {path} cannot be loaded: {error}. Download or generate the data again, or remove this game."
        ) from error
    except ImportError as error:
        raise UserError(
            f"The game file {path} was made with another domain or grammar than alfworld 0.4.2's; reading it needs "
            f"textworld[pddl], which cannot be imported ({error}): install it, or use the current data release."
        ) from error


_cache = FileCache(_load, _CACHE_SIZE)
