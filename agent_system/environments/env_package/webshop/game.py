# SPDX-License-Identifier: Apache-2.0
"""`WebShopText`: the shop as a pure function from a state and an action to the next state, page and reward."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.observation import (
    BACK,
    BUY,
    NEXT,
    PREVIOUS,
    SUB_PAGES,
    ObservationMode,
    Part,
    done_page,
    index_page,
    item_page,
    render,
    results_page,
    sub_page,
)
from agent_system.environments.env_package.webshop.products import Product

__all__ = ["State", "WebShopText", "parse_action"]

_ACTION = re.compile(r"(.+)\[(.+)\]")
_PER_PAGE = 10


class State(NamedTuple):
    """Where a customer is; small, immutable and picklable.

    goal: index into the goal set. query: what was searched for. page_number: of the results, from 1. product: number
    of the product shown or bought, -1 for none. options: (name, value) pairs in the order of the first choice. sub:
    which sub-page. visited: numbers of the products opened since the index page. score: reward of the purchase.
    """

    goal: int
    page: Literal["index", "results", "item", "sub", "done"] = "index"
    query: str = ""
    page_number: int = 1
    product: int = -1
    options: tuple[tuple[str, str], ...] = ()
    sub: str = ""
    visited: frozenset[int] = frozenset()
    score: float | None = None


def parse_action(action: str) -> tuple[str, str] | None:
    """Name and lower-case argument of `name[argument]`; None for other text.

    The last brackets count, and what follows the closing one is ignored.
    """
    match = _ACTION.match(action)
    return None if match is None else (match[1], match[2].lower())


class WebShopText:
    """The rules of the shop; holds no state of its own, so that any number of sessions can share it.

    A search works on every page but the last; a click works for what the page offers; anything else changes nothing.
    A purchase ends the episode: the last page offers nothing and no action leaves it. The search words `<r>`, `<a>`,
    `<c>` and `<q>`, which the original answers at random or with a crash, are ordinary words here.

    Args:
        mode: how pages are shown, "text" or "text_rich". In "text" selected options do not show.
        show_attributes: item pages offer a page of attributes (off in the original's setups).
    """

    def __init__(
        self,
        catalogue: Catalogue,
        goals: GoalSet,
        mode: ObservationMode = "text",
        show_attributes: bool = False,
    ) -> None:
        if mode not in get_args(ObservationMode):
            raise ValueError(f"observation mode {mode!r} is none of {', '.join(get_args(ObservationMode))}")
        self.catalogue = catalogue
        self.goals = goals
        self.mode: ObservationMode = mode
        self.show_attributes = show_attributes

    def initial(self, goal: int) -> State:
        """The index page of a goal.

        Raises:
            IndexError: there is no such goal.
        """
        if not 0 <= goal < len(self.goals):
            raise IndexError(f"goal {goal} of {len(self.goals)}")
        return State(goal)

    def step(self, state: State, action: str) -> tuple[State, str, float, bool]:
        """Play an action: next state, its page, reward (0 to 1, other than 0 only for a purchase), done."""
        after = self._next(state, action)
        bought = after.page == "done" and state.page != "done"
        reward = after.score if bought and after.score is not None else 0.0
        return after, self.observe(after), reward, after.page == "done"

    def observe(self, state: State) -> str:
        """The page of a state."""
        parts = self._parts(state)
        if self.mode == "text":
            return render(parts, "text")
        opened = state.visited.intersection(self._hits(state))
        visited = frozenset(self.catalogue.listing(number).asin for number in opened)
        address = f"{'+'.join(state.query.split(' '))}/{state.page_number}/{json.dumps(dict(state.options))}"
        return render(parts, "text_rich", address if state.page == "item" else "", visited)

    def available_actions(self, state: State) -> dict[str, bool | list[str]]:
        """{"has_search_bar": bool, "clickables": lower-case names of what can be clicked, in the page's order}.

        The index page lists `search`, which cannot be clicked, as the original does.
        """
        return {"has_search_bar": state.page == "index", "clickables": list(self._clickables(state))}

    # -- rules --------------------------------------------------------------------------------------------------

    def _next(self, state: State, action: str) -> State:
        parsed = parse_action(action)
        if parsed is None or state.page == "done":
            return state
        name, argument = parsed
        if name == "search":
            return State(state.goal, "results", argument, visited=state.visited)
        if name == "click" and argument != "search":
            return self._click(state, argument)
        return state

    def _click(self, state: State, name: str) -> State:
        if name not in self._clickables(state):
            return state
        if name == BACK.lower():
            return State(state.goal)
        if state.page == "results":
            return self._click_result(state, name)
        if state.page == "sub":
            return state._replace(page="item", sub="")
        if name == PREVIOUS.lower():
            return State(state.goal, "results", state.query, state.page_number, visited=state.visited)
        if name == BUY.lower():
            return self._buy(state)
        for sub in SUB_PAGES:
            if name == sub.lower():
                return state._replace(page="sub", sub=sub)
        option = next(option for option, values in reversed(self._product(state).options) if name in values)
        return state._replace(options=tuple({**dict(state.options), option: name}.items()))

    def _click_result(self, state: State, name: str) -> State:
        if name == NEXT.lower():
            return state._replace(page_number=state.page_number + 1)
        if name == PREVIOUS.lower():
            return state._replace(page_number=state.page_number - 1)
        number = next(hit for hit in self._hits(state) if self.catalogue.listing(hit).asin.lower() == name)
        return state._replace(page="item", product=number, visited=state.visited | {number})

    def _buy(self, state: State) -> State:
        score = self.goals.reward(state.goal, state.product, dict(state.options)).score
        return state._replace(page="done", score=float(score))

    # -- pages --------------------------------------------------------------------------------------------------

    def _parts(self, state: State) -> list[Part]:
        if state.page == "done":
            product = self.catalogue.listing(state.product)
            return done_page(product.asin, dict(state.options), state.score or 0.0)
        instruction = self.goals[state.goal].instruction_text
        if state.page == "index":
            return index_page(instruction)
        if state.page == "results":
            listings = [self.catalogue.listing(number) for number in self._hits(state)]
            return results_page(instruction, state.page_number, len(self.catalogue.search(state.query)), listings)
        if state.page == "item":
            return item_page(instruction, self._product(state), self.show_attributes)
        return sub_page(instruction, self._product(state), state.sub)

    def _hits(self, state: State) -> Sequence[int]:
        """Numbers of the products on a results page; empty elsewhere."""
        if state.page != "results":
            return []
        start = _PER_PAGE * (state.page_number - 1)
        found: list[int] = self.catalogue.search(state.query)[start : start + _PER_PAGE].tolist()
        return found

    def _product(self, state: State) -> Product:
        return self.catalogue.product(state.product)

    def _clickables(self, state: State) -> dict[str, None]:
        """Names that can be clicked, each once, at the place of its first occurrence."""
        if state.page == "done":
            return {}
        kinds = ("button", "link", "option")
        parts = self._parts(state)
        return {part.text.lower(): None for kind in kinds for part in parts if part.kind == kind}
