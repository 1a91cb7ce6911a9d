# SPDX-License-Identifier: Apache-2.0
"""A scripted customer, fit to be imitated: it searches, reads, compares with the request, picks options and buys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agent_system.environments.env_package.webshop.pages import (
    Page,
    click,
    clicked,
    is_offered,
    offered_actions,
    page_text,
    parse_page,
)
from agent_system.environments.env_package.webshop.request import best_value, parse_request, price_bounds, tokens
from agent_system.environments.env_package.webshop.session import Info, WebShopSession
from agent_system.environments.expert import Distractions, ExpertAction

__all__ = ["ExpertAction", "WebShopExplorer"]

# Detours and mistakes stop here (share of the step limit), so that even a long search ends in time.
_DISTRACTED_SHARE = 0.4
# With so few steps left (and one for each option), the best product known is bought as it is.
_HURRY = 2
_MOST_PAGES = 5
# A title may say so many words fewer than the best one and still be worth a look before the next page is.
_TITLE_SLACK = 1
_RESULTS = re.compile(r"Page (\d+) \(Total results: (\d+)\)")
_PER_PAGE = 10

SubPage = Literal["features", "description"]


@dataclass(slots=True)
class _Known:
    """What was seen of a product."""

    asin: str
    title: frozenset[str]
    price: tuple[float, float]
    place: int
    words: set[str] = field(default_factory=set)
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    rejected: bool = False
    missing: int | None = None


class WebShopExplorer:
    """Plays one episode from its pages alone.

    It searches for the words of the request, opens the products whose titles say most of them and whose price fits,
    reads features and description until every word of the request is accounted for, picks the options named, and buys.
    Products that lack something are left again; near the step limit the best one seen is bought.

    Args:
        session: the session, of which only the request is read; reset it before the first `act`.
        rng: source of every random choice.
        detour_rate: chance, before each step of the plan, of a useless step instead: reading a page again, opening a
            product that does not fit, the next page, a needless option, going back.
        error_rate: chance, likewise, of an action that the page does not offer.
        max_steps: the caller's step limit; late in the episode there are no more detours or mistakes.
    """

    def __init__(
        self,
        session: WebShopSession,
        rng: np.random.Generator,
        detour_rate: float = 0.0,
        error_rate: float = 0.0,
        max_steps: int = 15,
    ) -> None:
        self._session = session
        self._rng = rng
        self._distractions = Distractions(rng, detour_rate, error_rate, int(max_steps * _DISTRACTED_SHARE))
        self._max_steps = max_steps
        self._step = 0
        self._products: dict[str, _Known] = {}
        self._query = ""
        self._here = ""  # asin of the product whose pages are shown
        self._sub = ""
        self._selected: dict[str, str] = {}

    def act(self, observation: str, info: Info) -> ExpertAction:
        """The next action, given the page just seen (first the index page) and its infos."""
        instruction = self._session.instruction
        if self._step == 0:
            self._request = parse_request(instruction)
        self._offered = offered_actions(info["available_actions"])
        self._page = parse_page(page_text(observation, instruction), self._offered)
        self._learn(self._page)
        choice = self._choose()
        self._step += 1
        self._remember(choice.action)
        return choice

    # -- what is known ------------------------------------------------------------------------------------------

    def _learn(self, page: Page) -> None:
        if page.kind == "results":
            self._here, self._selected = "", {}
            for place, (asin, title, tag) in enumerate(page.products):
                known = _Known(asin, frozenset(tokens(title)), price_bounds(tag), place)
                self._products.setdefault(asin, known)
        elif page.kind == "item":
            product = self._products[self._here]
            product.options = dict(page.options)
        elif page.kind == "sub" and self._sub:
            product = self._products[self._here]
            product.read.add(self._sub)
            product.words.update(tokens(" ".join(page.text)))

    def _remember(self, action: str) -> None:
        """Note what an action does, if the page offers it."""
        if not is_offered(action, self._offered):
            return
        name = clicked(action)
        if name is None:
            self._query = action[len("search[") : -1]
        elif self._page.kind == "results" and name in self._products:
            self._here, self._selected = name, {}
        elif self._page.kind == "item":
            for option, values in self._page.options:
                if name in values:
                    self._selected[option] = name
            self._sub = name if name in ("description", "features", "reviews") else ""
        elif name != "< prev":
            self._here = ""

    def _picks(self, product: _Known) -> dict[str, str]:
        """The options to choose: name -> value that the request names."""
        found = {name: best_value(values, self._request.words) for name, values in product.options.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _missing(self, product: _Known) -> set[str]:
        """Words of the request that nothing seen of the product accounts for."""
        explained = product.title | product.words
        for name, value in self._picks(product).items():
            explained |= {*tokens(name), *tokens(value)}
        return set(self._request.wanted) - explained

    def _lacks_option(self, product: _Known) -> bool:
        """Whether the request speaks of an option and of none of the values on offer."""
        picks = self._picks(product)
        words = set(self._request.words)
        return any(name not in picks and set(tokens(name)) <= words - product.title for name in product.options)

    def _coverage(self, product: _Known) -> int:
        return len(product.title & set(self._request.wanted))

    def _affordable(self, product: _Known) -> bool:
        return self._request.limit is None or product.price[0] <= self._request.limit

    # -- what kind of step --------------------------------------------------------------------------------------

    def _choose(self) -> ExpertAction:
        kind = self._distractions.kind(self._step)
        if kind == "mistake":
            return self._mistake()
        if kind == "detour":
            return self._detour()
        action, thought = self._plan()
        return ExpertAction(action, thought, "plan")

    def _pick(self, options: list[str]) -> str:
        return options[int(self._rng.integers(len(options)))]

    def _detour(self) -> ExpertAction:
        kind = self._page.kind
        plan, _ = self._plan()
        if kind == "index":
            words = list(self._request.wanted)
            kept = sorted(self._rng.permutation(len(words))[: max(1, len(words) // 3)].tolist())
            return ExpertAction(f"search[{' '.join(words[place] for place in kept)}]", "search more widely", "detour")
        useless = [action for action in self._offered if action not in (plan, click("buy now"), click("search"))]
        action = self._pick(useless)
        name = clicked(action) or ""
        thought = {
            "< prev": "go back once",
            "back to search": "start over again",
            "next >": "see more products",
            "reviews": "check the reviews",
        }.get(name, "look at this" if kind == "results" else "look more closely")
        return ExpertAction(action, thought, "detour")

    def _mistake(self) -> ExpertAction:
        words = self._request.wanted
        letters = "0123456789abcdefghijklmnopqrstuvwxyz"
        asin = "b0" + "".join(self._pick(list(letters)) for _ in range(8))
        options = [
            *(click(name) for name in ("buy now", "next >", "features", "add to cart", asin)),
            f"click[{words[-1]}]",
            f"click {words[0]}",
            "search",
            f"find[{words[0]}]",
        ]
        wrong = [action for action in options if not is_offered(action, self._offered)]
        return ExpertAction(self._pick(wrong), "try this one", "mistake")

    # -- the plan -----------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[str, str]:
        page = self._page
        if page.kind == "index":
            return f"search[{self._request.query}]", "search for it"
        if page.kind == "results":
            return self._from_results()
        if page.kind == "item":
            return self._from_item(self._products[self._here])
        return click("< prev"), "back to it"

    def _hurried(self, options: int) -> bool:
        return self._max_steps - self._step <= _HURRY + options

    def _from_results(self) -> tuple[str, str]:
        if self._query != self._request.query:
            return click("back to search"), "search again properly"
        listed = [self._products[asin] for asin, _, _ in self._page.products]
        fitting = [product for product in listed if self._affordable(product) and not product.rejected]
        hurried = self._hurried(2)
        best = max((self._coverage(product) for product in self._products.values()), default=0)
        if hurried and listed:
            closest = [product for product in listed if self._affordable(product)] or listed
            return click(min(closest, key=self._distance).asin), "take the closest"
        number, last = self._page_numbers()
        at_end = number >= last
        good = [product for product in fitting if self._coverage(product) >= best - _TITLE_SLACK]
        if good:
            return click(min(good, key=self._preference).asin), "open this one"
        if not at_end:
            return click("next >"), "see more products"
        # Nothing says everything: let the titles say less from here on.
        if fitting:
            return click(min(fitting, key=self._preference).asin), "open the closest"
        if number > 1:
            return click("< prev"), "look back again"
        return click("back to search"), "start over again"

    def _preference(self, product: _Known) -> tuple[int, bool, int]:
        """Titles that say most first, then those surely within the limit, then as ranked."""
        limit = self._request.limit
        return -self._coverage(product), limit is not None and product.price[1] > limit, product.place

    def _distance(self, product: _Known) -> tuple[int, int]:
        """How many words are missing, on the pages if they were read, else in the title; then as ranked."""
        in_title = len(self._request.wanted) - self._coverage(product)
        return in_title if product.missing is None else product.missing, product.place

    def _page_numbers(self) -> tuple[int, int]:
        """Number of this results page and of the last one worth seeing."""
        found = next((match for text in self._page.text if (match := _RESULTS.fullmatch(text))), None)
        if found is None:
            return 1, 1
        number, total = int(found[1]), int(found[2])
        return number, min(_MOST_PAGES, max(1, -(-total // _PER_PAGE)))

    def _from_item(self, product: _Known) -> tuple[str, str]:
        picks = self._picks(product)
        open_picks = {name: value for name, value in picks.items() if self._selected.get(name) != value}
        missing = self._missing(product)
        product.missing = len(missing)
        if not self._hurried(len(open_picks)):
            if not self._affordable(product) or self._lacks_option(product):
                return self._leave(product)
            if missing:
                for sub in ("features", "description"):
                    if sub not in product.read:
                        return click(sub), f"read the {sub}"
                return self._leave(product)
        for name, value in open_picks.items():
            return click(value), f"pick the {name}"
        return click("buy now"), "buy it now"

    def _leave(self, product: _Known) -> tuple[str, str]:
        product.rejected = True
        return click("< prev"), "not this one"
