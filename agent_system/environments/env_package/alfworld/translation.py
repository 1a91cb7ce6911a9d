# SPDX-License-Identifier: Apache-2.0
"""A planning problem as numbered facts and operators: made once per game file by the installed translator, then cached.

Only the translator's reading, normalisation and grounding are used, as Python functions; neither the C library nor the
planner is loaded. A literal is an integer: `2 * atom` says that the atom is true, `2 * atom + 1` that it is false.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.alfworld.cache import cache_dir, read_cached, write_cached

__all__ = ["Operator", "Translation", "TranslationError", "load_translation", "translate"]

# Raised whenever the meaning of a cached file changes.
_FORMAT_VERSION = 1
_PACKAGES = ("fast-downward-textworld",)
# The translator keeps its options in a module and prints; one translation at a time.
_LOCK = threading.Lock()


class TranslationError(ValueError):
    """The translator refuses the problem, or its goal can never be reached."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One grounded action. `effects`: (literal to make true, condition literals), in the engine's order."""

    name: str
    arguments: tuple[str, ...]
    condition: tuple[int, ...]
    effects: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Translation:
    """A grounded problem. Symbols are lower case, as the translator reads them."""

    types: tuple[tuple[str, tuple[str, ...]], ...]
    """Type and its supertypes."""
    objects: dict[str, str]
    """Object -> type."""
    static: tuple[tuple[str, ...], ...]
    """Facts that no action changes: predicate, arguments."""
    atoms: tuple[tuple[str, ...], ...]
    """The facts that can change, sorted by predicate and arguments."""
    start: tuple[int, ...]
    """Atoms true at the start, without derived ones."""
    operators: tuple[Operator, ...]
    """In the order in which the engine lists the applicable ones."""
    axioms: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(layer, derived atom, condition literals), by layer; without one that applies, a derived atom is false."""
    goal: tuple[int, ...]
    parameters: dict[str, tuple[tuple[str, str], ...]]
    """Action -> (parameter, type); an operator's arguments belong to the first of them."""

    def to_json(self) -> str:
        """All fields as one JSON text; see `from_json`."""
        rows = [[op.name, op.arguments, op.condition, op.effects] for op in self.operators]
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "operators"}
        return json.dumps({**fields, "operators": rows}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Translation:
        """The translation that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: the text is something else.
        """
        data = json.loads(text)
        return cls(
            types=tuple((name, tuple(parents)) for name, parents in data["types"]),
            objects={str(name): str(kind) for name, kind in data["objects"].items()},
            static=tuple(tuple(fact) for fact in data["static"]),
            atoms=tuple(tuple(atom) for atom in data["atoms"]),
            start=tuple(data["start"]),
            operators=tuple(
                Operator(name, tuple(arguments), tuple(condition), tuple((e, tuple(when)) for e, when in effects))
                for name, arguments, condition, effects in data["operators"]
            ),
            axioms=tuple((layer, number, tuple(condition)) for layer, number, condition in data["axioms"]),
            goal=tuple(data["goal"]),
            parameters={
                name: tuple((parameter, kind) for parameter, kind in row) for name, row in data["parameters"].items()
            },
        )


def _cache_file(domain: str, problem: str) -> Path:
    """Where the translation of these two texts lies, for this format and these packages."""
    versions = []
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name}={version(name)}")
    digest = hashlib.sha256("\0".join([domain, problem, *versions]).encode("utf-8")).hexdigest()
    return cache_dir() / "alfworld-translations" / f"v{_FORMAT_VERSION}" / f"{digest}.json.z"


def load_translation(domain: str, problem: str) -> Translation:
    """The translation of a problem, from the disk cache or made and cached.

    Raises:
        TranslationError: see `translate`.
        ImportError: the translator is not installed.
    """
    path = _cache_file(domain, problem)
    cached = read_cached(path)
    if cached is not None:
        try:
            return Translation.from_json(cached)
        except (ValueError, KeyError, TypeError, AttributeError):
            path.unlink(missing_ok=True)
    translation = translate(domain, problem)
    write_cached(path, translation.to_json().encode("utf-8"))
    return translation


@contextlib.contextmanager
def _quiet_translator() -> Iterator[None]:
    """The translator reads sys.argv when imported, keeps its options in a module and prints to stdout."""
    saved = sys.argv
    with _LOCK, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["translate.py", "domain", "task"]
        try:
            yield
        finally:
            sys.argv = saved


def translate(domain: str, problem: str) -> Translation:
    """Ground a problem with the installed translator, with the options that the stock engine uses.

    Raises:
        TranslationError: the texts are no PDDL that the translator reads, or the goal can never be reached.
        ImportError: the translator is not installed.
    """
    with _quiet_translator():
        import fast_downward  # noqa: F401  (the package puts its translator on the path)
        from fast_downward.translate import options

        options.filter_unimportant_vars = False
        options.filter_unreachable_facts = False
        options.use_partial_encoding = False
        options.add_implied_preconditions = False
        options.invariant_generation_max_candidates = 0
        try:
            return _ground(domain, problem)
        except TranslationError:
            raise
        except (Exception, SystemExit) as error:
            # The translator has no exception of its own: it asserts, indexes, and calls sys.exit.
            reason = " ".join(str(error).split())[:200]
            raise TranslationError(f"{type(error).__name__}: {reason}") from error


def _ground(domain: str, problem: str) -> Translation:
    from fast_downward.translate import instantiate, normalize, pddl, variable_order
    from fast_downward.translate import translate as translator
    from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions

    task = parsing_functions.parse_task(
        lisp_parser.parse_nested_list(domain.split("\n")), lisp_parser.parse_nested_list(problem.split("\n"))
    )
    normalize.normalize(task)
    reachable, fluents, actions, axioms, _ = instantiate.explore(task)
    if not reachable:
        raise TranslationError("its goal can never be reached")
    atoms = sorted(fluents)
    # No invariants are asked for, so every atom is a variable of its own with the values true (0) and false (1).
    where = {atom: [(number, 0)] for number, atom in enumerate(atoms)}
    ranges = [2] * len(atoms)
    goals = list(task.goal.parts) if isinstance(task.goal, pddl.Conjunction) else [task.goal]
    names = [["", ""]] * len(atoms)
    sas = translator.translate_task(
        where, ranges, names, where, ranges, [], task.init, goals, actions, axioms, task.use_min_cost_metric, {}
    )
    if len(sas.variables.ranges) != len(atoms):
        raise TranslationError("its goal is always or never reached")
    number_of = {variable: rank for rank, variable in enumerate(variable_order.CausalGraph(sas).get_ordering())}
    return Translation(
        types=tuple((kind.name, tuple(kind.supertype_names)) for kind in task.types),
        objects={item.name: item.type_name for item in task.objects},
        static=_static_facts(task.init, where),
        atoms=tuple((atom.predicate, *atom.args) for atom in atoms),
        start=tuple(number for number, value in enumerate(sas.init.values) if value == 0),
        operators=_operators(sas.operators, number_of),
        axioms=tuple(
            sorted(
                (sas.variables.axiom_layers[number], number, _literals(axiom.condition))
                for axiom in sas.axioms
                for number, value in [axiom.effect]
                if value == 0  # rules for the negation serve heuristics only
            )
        ),
        goal=_literals(sas.goal.pairs),
        parameters={
            action.name: tuple((item.name.strip("?"), item.type_name) for item in action.parameters)
            for action in task.actions
        },
    )


def _literals(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(2 * number + value for number, value in pairs)


def _static_facts(init: list[Any], fluents: dict[Any, Any]) -> tuple[tuple[str, ...], ...]:
    """Initial facts that no action changes. As in the stock engine, a number that is not written in digits only
    counts as a fact named by it, and other numbers (costs, distances) do not exist."""
    facts = []
    for element in init:
        if hasattr(element, "predicate"):
            if element.predicate != "=" and element not in fluents:
                facts.append((element.predicate, *element.args))
        elif element.fluent.symbol != "total-cost" and not str(element.expression.value).isdigit():
            facts.append((str(element.expression.value), *element.fluent.args))
    return tuple(sorted(set(facts)))


def _operators(operators: list[Any], number_of: dict[int, int]) -> tuple[Operator, ...]:
    """Operators in the order of the engine's search tree: by their sorted conditions in its variable numbering."""
    rows = []
    for position, operator in enumerate(operators):
        pairs = list(operator.prevail) + [(var, pre) for var, pre, _, _ in operator.pre_post if pre != -1]
        pairs = sorted(set(pairs))
        key = sorted((number_of[var], value) for var, value in pairs)
        name, *arguments = operator.name[1:-1].split()
        effects = tuple((2 * var + post, _literals(when)) for var, _, post, when in operator.pre_post)
        rows.append((key, position, Operator(name, tuple(arguments), _literals(pairs), effects)))
    rows.sort(key=lambda row: row[:2])
    return tuple(row[2] for row in rows)
