# SPDX-License-Identifier: Apache-2.0
"""The text grammar of a game file: templates with queries over the facts, expanded without the stock generator.

The installed package's parsers read the file once per text; what follows a parse (queries, lists, choices) is done
here. Expressions in braces are Python in the stock engine; here a small set of them is understood and nothing is run.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

__all__ = ["Entity", "Facts", "GrammarError", "Scope", "TextGrammar", "Variable"]

Variable = tuple[str, str]
"""(name, type) of an object, or of a placeholder."""


class GrammarError(ValueError):
    """The grammar cannot be read, or needs something this engine does not do; the message names the text."""


@dataclass(frozen=True, slots=True)
class Entity:
    """What expressions can read of an object; the fields that the stock engine leaves empty are None."""

    id: str
    type: str
    name: str
    definite: str = "the"
    indefinite: str = "a"
    noun: str | None = None
    adj: str | None = None
    desc: str | None = None
    room_type: str | None = None
    synonyms: str | None = None

    def __str__(self) -> str:
        return self.name


class Facts(Protocol):
    """What queries read."""

    def matching(self, predicate: str, types: tuple[str, ...]) -> list[tuple[Variable, ...]]:
        """All facts of a predicate whose arguments have these types or subtypes, in a fixed order."""

    def holds(self, predicate: str, types: tuple[str, ...], arguments: tuple[Variable, ...]) -> bool:
        """Whether one of `matching` has exactly these arguments."""

    def entity(self, name: str) -> Entity:
        """What is known of an object."""


class Scope(NamedTuple):
    """What is bound where an expression stands: entities by name, and objects by placeholder."""

    names: dict[str, Entity]
    bound: dict[Variable, Variable]


class _Predicate(NamedTuple):
    name: str
    placeholders: tuple[Variable, ...]
    types: tuple[str, ...]


Query = tuple[_Predicate, ...]
Expression = Callable[[Mapping[str, Entity]], Any]


class _Text(NamedTuple):
    text: str


class _Symbol(NamedTuple):
    name: str


class _Value(NamedTuple):
    evaluate: Expression


class _ForEach(NamedTuple):
    """`{part | query}`: the part once per match, or once when there is no query; `listed` = in brackets."""

    part: _Symbol | _Value
    query: Query
    listed: bool


_Node = _Text | _Symbol | _Value | _ForEach
_FIELDS = frozenset(Entity.__dataclass_fields__)
_LIST_RULES = ("list_empty", "list_separator", "list_last_separator")
# `{... | query}` in a template, and a predicate in a query.
_QUERY = re.compile(r"\|([^|{}]*)\}")
_PREDICATE = re.compile(r"([\w/]+)\s*\(")


@lru_cache(maxsize=4096)
def _expression(text: str) -> Expression:
    """Compile names, their fields, constants, `+`, `and`, `or`, `not`, comparisons for equality, `x if c else y`."""
    try:
        return _compile(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise GrammarError(f"the expression {text!r} is not supported ({error})") from error


def _compile(node: ast.expr) -> Expression:
    match node:
        case ast.Constant(value=str() | int() | None as value):
            return lambda names: value
        case ast.Name(id=name):
            return lambda names: names[name]
        case ast.Attribute(value=ast.Name(id=name), attr=field) if field in _FIELDS:
            return lambda names: getattr(names[name], field)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _compile(left), _compile(right)
            return lambda names: first(names) + second(names)
        case ast.BoolOp(op=ast.Or() | ast.And() as operator, values=values):
            return _chain([_compile(value) for value in values], stop_at=isinstance(operator, ast.Or))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _compile(operand)
            return lambda names: not inner(names)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as operator], comparators=[right]):
            first, second, equal = _compile(left), _compile(right), isinstance(operator, ast.Eq)
            return lambda names: (first(names) == second(names)) == equal
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, yes, no = _compile(test), _compile(body), _compile(orelse)
            return lambda names: yes(names) if condition(names) else no(names)
    raise ValueError(f"{type(node).__name__} is none of the forms that texts may use")


def _chain(parts: list[Expression], stop_at: bool) -> Expression:
    def evaluate(names: Mapping[str, Entity]) -> Any:
        value = None
        for part in parts:
            value = part(names)
            if bool(value) == stop_at:
                break
        return value

    return evaluate


@contextmanager
def _parsing(what: str) -> Iterator[None]:
    """Whatever the installed package's parsers raise leaves as a `GrammarError` (they have no exception of their own:
    the parser generator's share no public base with json's, and conflicting types are a ValueError)."""
    try:
        yield
    except GrammarError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise GrammarError(f"{what} cannot be read ({type(error).__name__}: {reason})") from error


@lru_cache(maxsize=4096)
def _query(text: str) -> Query:
    """The predicates of a condition.

    Raises:
        GrammarError: it is none.
    """
    if not text:
        return ()
    from textworld.logic import Rule

    with _parsing(f"the condition {text!r}"):
        conditions = Rule.parse_conjunctive_query(text).preconditions
    predicates = []
    for predicate in conditions:
        placeholders = tuple((item.name, item.type) for item in predicate.parameters)
        predicates.append(_Predicate(predicate.name, placeholders, tuple(kind for _, kind in placeholders)))
    return tuple(predicates)


@lru_cache(maxsize=8192)
def _symbols(text: str) -> tuple[_Node, ...]:
    """Parse one template with the installed package's parser.

    Raises:
        GrammarError: it is none.
    """
    from textworld.envs.pddl.textgen import ContextSensitiveGrammar

    with _parsing(f"the text {text!r}"):
        grammar = ContextSensitiveGrammar.parse(json.dumps({"text": [{"rhs": text}]}))
        return tuple(_node(symbol) for symbol in grammar._rules["text"][0].rhs)


def _node(symbol: Any) -> Any:
    from textworld.envs.pddl.textgen import (
        ConditionalSymbol,
        EvalSymbol,
        ListSymbol,
        NonterminalSymbol,
        TerminalSymbol,
    )

    if isinstance(symbol, ListSymbol):
        return _node(symbol.symbol)._replace(listed=True)
    if isinstance(symbol, ConditionalSymbol):
        return _ForEach(_node(symbol.expression), _query(symbol.given or ""), False)
    if isinstance(symbol, EvalSymbol):
        return _Value(_expression(symbol.expression))
    if isinstance(symbol, NonterminalSymbol):
        return _Symbol(str(symbol))
    if isinstance(symbol, TerminalSymbol):
        return _Text(str(symbol))
    raise GrammarError(f"the symbol {symbol!r} is not known")


def _bindings(facts: Facts, query: Query, bound: dict[Variable, Variable]) -> Iterator[dict[Variable, Variable]]:
    """All ways to bind the query's placeholders, different ones to different objects, in the order of the facts."""
    return _extend(facts, query, 0, dict(bound), set(bound.values()))


def _extend(
    facts: Facts, query: Query, depth: int, bound: dict[Variable, Variable], used: set[Variable]
) -> Iterator[dict[Variable, Variable]]:
    if depth == len(query):
        yield bound.copy()
        return
    predicate = query[depth]
    fresh = [item for item in predicate.placeholders if item not in bound]
    if not fresh:
        if facts.holds(predicate.name, predicate.types, tuple(bound[item] for item in predicate.placeholders)):
            yield from _extend(facts, query, depth + 1, bound, used)
        return
    for arguments in facts.matching(predicate.name, predicate.types):
        for placeholder, argument in zip(predicate.placeholders, arguments):
            existing = bound.get(placeholder)
            if existing is None:
                if argument in used:
                    break
                bound[placeholder] = argument
                used.add(argument)
            elif existing != argument:
                break
        else:
            yield from _extend(facts, query, depth + 1, bound, used)
        for placeholder in fresh:
            if placeholder in bound:
                used.discard(bound.pop(placeholder))


class TextGrammar:
    """The actions and rules of one grammar text.

    Raises:
        GrammarError: the text is not a grammar.
    """

    def __init__(self, text: str) -> None:
        self.templates: dict[str, str] = {}
        self.feedback: dict[str, str] = {}
        self._rules: dict[str, list[dict[str, Any]]] = {}
        with _parsing("its grammar"):
            for part in _document(text).parts:
                self._add(part)

    def _add(self, part: Any) -> None:
        # Nodes are told apart by what they carry: an action has a template, a grammar block only code.
        if hasattr(part, "template"):
            name = part.name.lower()
            self.templates[name] = part.template.template[1:-1]
            self.feedback[name] = part.feedback.name[1:-1]
            code = textwrap.dedent(part.grammar.code[3:-3]) if part.grammar else "{}"
            code = "\n".join(line for line in code.split("\n") if not line.lstrip().startswith("#"))
        else:
            code = textwrap.dedent(part.code[3:-3])
        for name, rules in json.loads(code).items():
            self._rules[name] = [{"rhs": rule["rhs"], "condition": rule.get("condition", "")} for rule in rules]

    def predicates_read(self) -> frozenset[str]:
        """Names of all predicates that some text may depend on, without `not_`."""
        queries = [query for text in self._texts() for query in _QUERY.findall(text)]
        queries += [rule["condition"] for rules in self._rules.values() for rule in rules]
        return frozenset(name.removeprefix("not_") for query in queries for name in _PREDICATE.findall(query))

    def _texts(self) -> list[str]:
        texts = [*self.templates.values(), *self.feedback.values()]
        return texts + [rule["rhs"] for rules in self._rules.values() for rule in rules]

    def reads(self, text: str) -> frozenset[str]:
        """Names of the predicates that the expansion of a template may depend on, without `not_`.

        Raises:
            GrammarError: a rule or condition cannot be read.
        """
        found: set[str] = set()
        seen: set[str] = set()
        pending: list[_Node] = list(_symbols(text))
        while pending:
            node = pending.pop()
            if isinstance(node, _ForEach):
                found.update(predicate.name.removeprefix("not_") for predicate in node.query)
                pending.append(node.part)
                pending += map(_Symbol, _LIST_RULES) if node.listed and node.query else ()
            elif isinstance(node, _Symbol) and node.name not in seen:
                seen.add(node.name)
                for rule in self._rules.get(node.name, ()):
                    pending += _symbols(rule["rhs"])
                    found.update(item.name.removeprefix("not_") for item in _query(rule["condition"]))
        return frozenset(found)

    def derive(self, text: str, facts: Facts, scope: Scope) -> str:
        """Expand a template.

        Raises:
            GrammarError: a rule is missing or none applies, or an expression reads what is not bound.
        """
        out: list[str] = []
        try:
            for node in _symbols(text):
                self._emit(node, facts, scope, out)
        except (KeyError, TypeError, RecursionError) as error:
            raise GrammarError(f"the text {text!r} cannot be made ({type(error).__name__}: {error})") from error
        return "".join(out)

    def _emit(self, node: _Node, facts: Facts, scope: Scope, out: list[str]) -> None:
        if isinstance(node, _Text):
            out.append(node.text)
        elif isinstance(node, _Value):
            out.append(str(node.evaluate(scope.names)))
        elif isinstance(node, _Symbol):
            for inner in self._choose(node.name, facts, scope):
                self._emit(inner, facts, scope, out)
        else:
            self._emit_each(node, facts, scope, out)

    def _emit_each(self, node: _ForEach, facts: Facts, scope: Scope, out: list[str]) -> None:
        if not node.query:
            self._emit(node.part, facts, scope, out)
            return
        matches = list(_bindings(facts, node.query, scope.bound))
        if not matches and node.listed:
            self._emit(_Symbol("list_empty"), facts, scope, out)
        for number, bound in enumerate(matches):
            if number and node.listed:
                separator = "list_last_separator" if number == len(matches) - 1 else "list_separator"
                self._emit(_Symbol(separator), facts, scope, out)
            names = dict(scope.names)
            for (placeholder, _), (name, _) in bound.items():
                names[placeholder] = facts.entity(name)
            self._emit(node.part, facts, Scope(names, bound), out)

    def _choose(self, name: str, facts: Facts, scope: Scope) -> tuple[_Node, ...]:
        """The first rule of a symbol whose condition has a match."""
        rules = self._rules.get(name)
        if not rules:
            raise GrammarError(f"the grammar has no rule for #{name}#")
        for rule in rules:
            condition = rule["condition"]
            if not condition or next(_bindings(facts, _query(condition), scope.bound), None) is not None:
                return _symbols(rule["rhs"])
        raise GrammarError(f"no rule for #{name}# applies")


@lru_cache(maxsize=1)
def _parser() -> Any:
    from textworld.envs.pddl.logic.model import PddlLogicModelBuilderSemantics
    from textworld.envs.pddl.logic.parser import PddlLogicParser

    return PddlLogicParser(semantics=PddlLogicModelBuilderSemantics(), parseinfo=True)


def _document(text: str) -> Any:
    return _parser().parse(text, rule_name="pddlStart")
