# SPDX-License-Identifier: Apache-2.0
"""What a shop page says, taken from its text: the request, the part shown to the model, the actions it offers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "SEARCH_ACTION",
    "Page",
    "click",
    "clicked",
    "episode_pages",
    "extract_task",
    "is_item_page",
    "is_offered",
    "offered_actions",
    "page_lines",
    "page_text",
    "parse_page",
    "revealed_page",
]

PageKind = Literal["index", "results", "item", "sub", "done"]

SEARCH_ACTION = "search[<your query>]"
"""Stands for every search in the list of actions."""

_SEP = " [SEP] "
_RESULTS = re.compile(r"Page \d+ \(Total results: \d+\)")
_NAVIGATION = frozenset(
    ["search", "back to search", "< prev", "next >", "description", "features", "reviews", "attributes", "buy now"]
)
_SHOWS_NOTHING = frozenset(["search", "back to search", "< prev", "buy now"])
_MARKS = re.compile(r"\[(clicked )?button_?\]")
_DONE = "Thank you for shopping with us!"
_CLICKED_LINE = "You have clicked "
_CLICK = re.compile(r"click\[(.+)\]")
_SEARCH = re.compile(r"search\[(.+)\]")


def click(name: str) -> str:
    """The action that clicks `name`."""
    return f"click[{name}]"


def clicked(action: str) -> str | None:
    """What an action clicks; None for a search or anything else."""
    match = _CLICK.match(action)
    return None if match is None else match[1]


def offered_actions(available: Mapping[str, Any]) -> list[str]:
    """A session's `available_actions` as a list: `SEARCH_ACTION` when there is a search bar, then one click each."""
    search = [SEARCH_ACTION] if available["has_search_bar"] else []
    return search + [click(name) for name in available["clickables"]]


def is_offered(action: str, offered: Sequence[str]) -> bool:
    """Whether the list of actions allows `action`; any query does where searching is offered."""
    return action in offered or (SEARCH_ACTION in offered and _SEARCH.match(action) is not None)


def extract_task(observation: str) -> str:
    """The request of a first page in text mode: its third part, after `Instruction:`.

    Raises:
        ValueError: the page does not have that form.
    """
    parts = observation.split(_SEP)
    if len(parts) < 3 or parts[1] != "Instruction:":
        raise ValueError(f"no 'Instruction:' as the second part of the first page: {observation[:200]!r}")
    return parts[2]


def page_text(observation: str, task: str) -> str:
    """The page without what stands before and in the request, which every page repeats.

    text mode: the parts behind the request, each in single quotes, joined by ` [SEP] `. text_rich mode: the lines
    behind the request, after the `You have clicked ...` lines. A page without the request (the last one) stays as it
    is.
    """
    if _SEP in observation:
        parts = observation.split(_SEP)
        if task not in parts:
            return observation
        return _SEP.join(f"'{part}'" for part in parts[parts.index(task) + 1 :])
    lines = observation.split("\n")
    if task not in lines:
        return observation
    start = lines.index(task)
    notes = [line for line in lines[:start] if line.startswith(_CLICKED_LINE)]
    return "\n".join([*notes, *lines[start + 1 :]])


@dataclass(frozen=True)
class Page:
    """A page in the form `page_text` gives it, taken apart.

    kind: which page. text: what is neither a product nor an option nor a button, in order. products: (asin in lower
    case, title, price tag) of a results page. options: (name, values in lower case) of an item page.
    """

    kind: PageKind
    text: tuple[str, ...]
    products: tuple[tuple[str, str, str], ...] = ()
    options: tuple[tuple[str, tuple[str, ...]], ...] = ()


def parse_page(text: str, offered: Sequence[str]) -> Page:
    """Take a page apart.

    Args:
        text: as `page_text` returns it, in either mode.
        offered: the page's actions; they tell buttons from text.
    """
    parts = _parts(text)
    names = {name for name in map(clicked, offered) if name is not None}
    kind = _kind(parts, names)
    if kind == "results":
        return _results(parts, names - _NAVIGATION)
    if kind == "item":
        return _item(parts, names - _NAVIGATION)
    return Page(kind, tuple(part for part in parts if part.lower() not in names))


def _parts(text: str) -> list[str]:
    if _SEP in text or text[:1] == "'":
        return [part[1:-1] if part[:1] == part[-1:] == "'" else part for part in text.split(_SEP)]
    lines = (line for line in text.split("\n") if not line.startswith(_CLICKED_LINE))
    return [part for part in (_MARKS.sub("", line).strip() for line in lines) if part]


def is_item_page(text: str) -> bool:
    """Whether a page, as `page_text` returns it, has the button that buys: an item's own page, no sub-page of it."""
    return "Buy Now" in _parts(text)


def _kind(parts: Sequence[str], names: set[str]) -> PageKind:
    if not names:
        return "done"
    if "buy now" in names:
        return "item"
    if any(_RESULTS.fullmatch(part) for part in parts):
        return "results"
    return "sub" if "< prev" in names else "index"


def _results(parts: Sequence[str], asins: set[str]) -> Page:
    text, products = [], []
    position = 0
    while position < len(parts):
        part = parts[position]
        if part.lower() in asins:
            title, price = (*parts[position + 1 : position + 3], "", "")[:2]
            products.append((part.lower(), title, price))
            position += 3
            continue
        if part.lower() not in _NAVIGATION:
            text.append(part)
        position += 1
    return Page("results", tuple(text), products=tuple(products))


def _item(parts: Sequence[str], values: set[str]) -> Page:
    """Options come first; a name is the part before its first value."""
    text: list[str] = []
    options: list[tuple[str, list[str]]] = []
    for position, part in enumerate(parts):
        name = part.lower()
        if name in values:
            if text and position and parts[position - 1] == text[-1]:
                options.append((text.pop(), []))
            if options:
                options[-1][1].append(name)
        elif name not in _NAVIGATION:
            text.append(part)
    return Page("item", tuple(text), options=tuple((name, tuple(found)) for name, found in options))


def page_lines(page: Page) -> list[str]:
    """A page in short, in lower case like actions: its text, a line for each product (`title price click[asin]`: what
    there is to know of a click comes before it), a line for each option (`name: click[value] click[value]`); no
    buttons."""
    lines = [part.lower() for part in page.text]
    lines += [f"{title.lower()} {price} {click(asin)}" for asin, title, price in page.products]
    return lines + [f"{name.lower()}: {' '.join(map(click, values))}" for name, values in page.options]


def revealed_page(action: str, text: str) -> str | None:
    """A name for the page that `action` led to, the same whenever it says the same; None for an action that cannot
    show a new page (going back, selecting an option, buying).

    Args:
        text: the page after the action, as `page_text` returns it.
    """
    name = clicked(action)
    if name in _SHOWS_NOTHING or text.startswith(_CLICKED_LINE) or (name is None and not _SEARCH.match(action)):
        return None
    return _MARKS.sub("", text)


def episode_pages(pages: Sequence[str], offered: Sequence[Sequence[str]]) -> list[str]:
    """The pages of one episode in short, for a reader who sees all of them at once.

    Lines of `page_lines`; a page that was there before only says which one it is, the last one not what it scored.

    Args:
        pages: as `page_text` returns them, before each action and after the last one.
        offered: the actions of each page but the last.
    """
    shown: list[str] = []
    first: dict[str, int] = {}
    for number, text in enumerate(pages):
        if text in first:
            shown.append(f"page {first[text]} again")
            continue
        first[text] = number
        if text.startswith(_DONE):
            shown.append(f"page {number}: bought")
            continue
        page = parse_page(text, offered[number] if number < len(offered) else ())
        shown.append(f"page {number}: {' | '.join(page_lines(page)) or page.kind}")
    return shown
