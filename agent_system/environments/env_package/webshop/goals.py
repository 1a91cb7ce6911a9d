# SPDX-License-Identifier: Apache-2.0
"""`GoalSet`: every goal of a shop in one fixed order, with the prices that belong to it."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.human_goals import HumanGoal, read_human_goals
from agent_system.environments.env_package.webshop.products import Product
from agent_system.environments.env_package.webshop.reward import (
    Goal,
    OptionMatch,
    Purchase,
    RewardDetails,
    compute_reward,
    is_winnable,
)
from agent_system.environments.env_package.webshop.splits import SplitMode, overlap, split_goals
from verl.utils.errors import UserError

__all__ = ["FIXED_SEED", "Goal", "GoalSet"]

FIXED_SEED = 233
"""Seed of WebShop's own shuffle of the goals."""

_NO_LIMIT = 1_000_000.0
_MOST_GOALS = 1 << 31
_GOALS_KEPT = 128


class GoalSet:
    """The goals of a shop, numbered from 0; goal i is made when asked for.

    Prices, price limits and order are drawn with Python's generator exactly as WebShop draws them, so that one seed
    gives the same goals in every process.
    """

    def __init__(
        self, catalogue: Catalogue, human: tuple[HumanGoal, ...] | None, seed: int, option_match: OptionMatch
    ) -> None:
        """Use `GoalSet.load`."""
        self.catalogue = catalogue
        self.human_goals = human is not None
        self.seed = seed
        self.option_match: OptionMatch = option_match
        self._human = human
        rng = random.Random(seed)
        self.prices = _purchase_prices(catalogue.prices, rng)
        """float64 (products,): what a product costs when bought, in dollars."""
        if human is None:
            sources = catalogue.instructed
            counts = catalogue.combinations
        else:
            sources = np.array([goal.product for goal in human], np.int32)
            counts = np.ones(len(human), np.int64)
        self._source_products = sources
        self._limits = np.array([_price_limit(float(self.prices[product]), rng) for product in sources], np.float64)
        total = int(counts.sum())
        if total == 0:
            raise UserError(f"The shop in {catalogue.data_dir} has no synthetic goal; set human_goals=True.")
        if total >= _MOST_GOALS:
            raise UserError(f"The shop in {catalogue.data_dir} has {total} synthetic goals; set human_goals=True.")
        in_file_order = np.repeat(np.arange(len(sources), dtype=np.int32), counts)
        first = np.cumsum(counts) - counts
        order = list(range(total))
        random.Random(seed).shuffle(order)
        self.file_order: NDArray[np.int64] = np.array(order, np.int64)
        """int64 (goals,): place of each goal in the order of the files, before the shuffle."""
        self._sources = in_file_order[self.file_order]
        self._choices = self.file_order - first[self._sources]
        self._winnable: dict[int, bool] = {}
        self._make = lru_cache(maxsize=_GOALS_KEPT)(self._make_goal)

    @classmethod
    def load(
        cls,
        catalogue: Catalogue,
        *,
        human_goals: bool | None = None,
        seed: int = FIXED_SEED,
        option_match: OptionMatch = "upstream",
    ) -> GoalSet:
        """The goals of a shop.

        Args:
            human_goals: those that people wrote, from `items_human_ins.json`, instead of the synthetic ones; None
                takes that file for a generated shop and the synthetic goals for the original data.
            seed: of prices, price limits and order. Every part of a run must use the same one, except for verl-agent's
                order (`env.webshop.legacy_goal_order`): there each group of slots has its own.
            option_match: see `reward.compute_reward`.

        Raises:
            UserError: there are no such goals, or their file has another form.
        """
        wanted = catalogue.generated if human_goals is None else human_goals
        return cls(catalogue, read_human_goals(catalogue) if wanted else None, seed, option_match)

    def __reduce__(self) -> tuple[Any, ...]:
        return GoalSet, (self.catalogue, self._human, self.seed, self.option_match)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> Goal:
        if not 0 <= index < len(self):
            raise IndexError(f"goal {index} of {len(self)}")
        return self._make(index)

    def _make_goal(self, index: int) -> Goal:
        source = int(self._sources[index])
        product = self.catalogue.product(int(self._source_products[source]))
        options: tuple[str, ...] | Mapping[str, str]
        if self._human is not None:
            text, attributes = self._human[source].instruction, self._human[source].attributes
            options, weight = self._human[source].options, 1.0
        else:
            text, attributes = self.catalogue.instruction(source)
            options, weight = _choice(product, int(self._choices[index])), self._weight(attributes)
            if options:
                text += " with " + ", and ".join(f"{name}: {value}" for name, value in options.items())
        limit = float(self._limits[source])
        if limit < _NO_LIMIT:
            text += f", and price lower than {limit:.2f} dollars"
        return Goal(
            product.asin, product.category, product.query, product.title, product.product_category, text, attributes,
            limit, options, weight,
        )  # fmt: skip

    @cached_property
    def hash(self) -> str:
        """Hex SHA-256 of everything that determines the goals, their order, prices and how options are matched.

        The noun extractor, on which scores of wrong purchases depend, is not in it unless the shop has a table:
        records of one machine are played on another one. `metadata` names it.
        """
        record = hashlib.sha256(f"{self.catalogue.hash} {self.seed} {self.option_match} {self.human_goals}".encode())
        for goal in self._human or ():
            record.update(repr(goal).encode("utf-8", "backslashreplace"))
        return record.hexdigest()

    def metadata(self) -> dict[str, Any]:
        """For the record of a run: the catalogue's `metadata`, and `goals` (count), `human_goals`, `goal_seed`,
        `goal_hash`, `option_match`."""
        return {
            **self.catalogue.metadata(),
            "goals": len(self),
            "human_goals": self.human_goals,
            "goal_seed": self.seed,
            "goal_hash": self.hash,
            "option_match": self.option_match,
        }

    def product_of(self, index: int) -> int:
        """Number of the product that a goal is about."""
        return int(self._source_products[self._sources[index]])

    def reward(self, index: int, product: int, options: Mapping[str, str]) -> RewardDetails:
        """The reward for buying a product (by number) with the options chosen."""
        purchase = Purchase(self.catalogue.product(product), float(self.prices[product]), options)
        return compute_reward(purchase, self[index], self.catalogue.nouns, self.option_match)

    def winnable(self, index: int) -> bool:
        """Whether some purchase of the goal's own product is worth 1.0."""
        if index not in self._winnable:
            number = self.product_of(index)
            self._winnable[index] = is_winnable(
                self.catalogue.product(number),
                float(self.prices[number]),
                self[index],
                self.catalogue.nouns,
                self.option_match,
            )
        return self._winnable[index]

    def split(
        self, mode: SplitMode = "goal", seed: int = FIXED_SEED, val_goals: int | None = None
    ) -> dict[str, NDArray[np.int64]]:
        """Goals for training and for validation, disjoint, and the same goals whatever the order of this set.

        Args:
            mode: "goal" holds out goals, so that products may occur on both sides; "product" holds out products with
                all their goals.
            seed: of the shuffle that decides. With the default and the default order, validation is goals 0 to
                `val_goals` - 1, as in WebShop and verl-agent.
            val_goals: how many to hold out (product: at least); None = 500, or a quarter of the goals if fewer.

        Returns:
            {"train": int64 indices, "val": int64 indices}.

        Raises:
            UserError: no training goal would be left.
        """
        return split_goals(self.file_order, self._source_products[self._sources], mode, seed, val_goals)

    def overlap(self, split: Mapping[str, NDArray[np.int64]]) -> dict[str, float]:
        """For the record of a run: see `splits.overlap`."""
        return overlap(split, self._source_products[self._sources])

    @cached_property
    def _attribute_counts(self) -> Counter[str]:
        """How many synthetic goals have an attribute."""
        counts: Counter[str] = Counter()
        for place, combinations in enumerate(self.catalogue.combinations.tolist()):
            for attribute in self.catalogue.instruction(place)[1]:
                counts[attribute] += combinations
        return counts

    def _weight(self, attributes: tuple[str, ...]) -> float:
        """Mean of 1 / (number of goals with the attribute)."""
        if not attributes:
            return 0.0
        return sum(1.0 / self._attribute_counts[attribute] for attribute in attributes) / len(attributes)


def _purchase_prices(prices: NDArray[np.float64], rng: random.Random) -> NDArray[np.float64]:
    drawn = prices[:, 0].copy()
    for product in np.flatnonzero(~np.isnan(prices[:, 1])):
        drawn[product] = rng.uniform(float(prices[product, 0]), float(prices[product, 1]))
    return drawn


def _price_limit(price: float, rng: random.Random) -> float:
    """The larger of two of the next four multiples of 10 above a price; no limit from 980 dollars on."""
    candidates = [float(limit) for limit in range(10, 1000, 10) if limit > price][:4]
    return max(rng.sample(candidates, 2)) if len(candidates) >= 2 else _NO_LIMIT


def _choice(product: Product, number: int) -> dict[str, str]:
    """The choice of option values with a number: names in sorted order, the last one varying fastest."""
    options = sorted(product.options)
    chosen = []
    for name, values in reversed(options):
        number, place = divmod(number, len(values))
        chosen.append((name, values[place]))
    return dict(reversed(chosen))
