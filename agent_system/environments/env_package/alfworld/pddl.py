# SPDX-License-Identifier: Apache-2.0
"""Reading the parts of a PDDL problem file that the specialised simulator needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Node", "Problem", "UnknownShapeError", "parse_problem"]

Node = str | list["Node"]
"""A symbol or a parenthesised list of nodes."""

Fact = tuple[str, ...]
"""Predicate followed by its arguments, all in lower case (the planner lower-cases every symbol)."""

_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")


class UnknownShapeError(ValueError):
    """The file is outside what the specialised simulator knows; the interpreter has to run it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem file: object id -> type, the facts that hold at the start in file order, and the goal as nodes."""

    objects: dict[str, str]
    facts: tuple[Fact, ...]
    goal: Node


def _read(text: str) -> list[Node]:
    root: list[Node] = []
    stack: list[list[Node]] = [root]
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            node: list[Node] = []
            stack[-1].append(node)
            stack.append(node)
        elif token == ")":
            # The goal templates of the installed package close one parenthesis too many or too few.
            if len(stack) > 1:
                stack.pop()
        else:
            stack[-1].append(token)
    return root


def _typed(nodes: list[Node]) -> dict[str, str]:
    objects: dict[str, str] = {}
    pending: list[str] = []
    items = iter(nodes)
    for item in items:
        if not isinstance(item, str):
            raise UnknownShapeError("typed lists with 'either' are not supported")
        if item == "-":
            kind = next(items, None)
            if not isinstance(kind, str):
                raise UnknownShapeError("typed lists with 'either' are not supported")
            for name in pending:
                objects[name] = kind
            pending.clear()
        else:
            pending.append(item)
    if pending:
        raise UnknownShapeError("an object has no type")
    return objects


def parse_problem(text: str) -> Problem:
    """Parse the text of a problem file.

    Raises:
        UnknownShapeError: a section is missing or a fact is not a plain atom.
    """
    sections: dict[str, list[Node]] = {}
    for define in _read(text):
        if isinstance(define, list):
            for section in define:
                if isinstance(section, list) and section and isinstance(section[0], str):
                    sections[section[0]] = section
    for name in (":objects", ":init", ":goal"):
        if name not in sections:
            raise UnknownShapeError(f"the problem has no {name} section")
    facts: list[Fact] = []
    for node in sections[":init"][1:]:
        if not isinstance(node, list) or not node:
            raise UnknownShapeError("an initial fact is not a list")
        if node[0] == "=":  # costs and distances: nothing a player sees depends on them
            continue
        if not all(isinstance(part, str) for part in node):
            raise UnknownShapeError("an initial fact is nested")
        facts.append(tuple(str(part) for part in node))
    if len(sections[":goal"]) != 2:
        raise UnknownShapeError("the goal is not a single condition")
    return Problem(_typed(sections[":objects"][1:]), tuple(facts), sections[":goal"][1])
