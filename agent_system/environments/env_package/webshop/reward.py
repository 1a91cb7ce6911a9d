# SPDX-License-Identifier: Apache-2.0
"""WebShop's reward: how well what was bought fits the goal (Yao et al. 2022, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from agent_system.environments.env_package.webshop.fuzzy import token_set_ratio, words
from agent_system.environments.env_package.webshop.nouns import NounExtractor
from agent_system.environments.env_package.webshop.products import Product

__all__ = ["Goal", "OptionMatch", "Purchase", "RewardDetails", "compute_reward", "is_winnable"]

OptionMatch = Literal["upstream", "fixed"]

_ALIKE = 85  # two phrases with a ratio above it count as the same
_NO_NOUNS_SCORE = 0.2
_COLORS = (
    "alabaster", "apricot", "aqua", "ash", "asphalt", "azure", "banana", "beige", "black", "blue", "blush",
    "bordeaux", "bronze", "brown", "burgundy", "camel", "camo", "caramel", "champagne", "charcoal", "cheetah",
    "chestnut", "chocolate", "christmas", "coffee", "cognac", "copper", "coral", "cranberry", "cream", "crystal",
    "dark", "denim", "eggplant", "elephant", "espresso", "fuchsia", "gold", "granite", "grape", "graphite",
    "grass", "gray", "green", "grey", "heather", "indigo", "ivory", "ivy", "khaki", "lavender", "lemon", "leopard",
    "light", "lilac", "lime", "magenta", "maroon", "mauve", "merlot", "midnight", "mint", "mocha", "multicolor",
    "mushroom", "mustard", "natural", "navy", "nude", "olive", "orange", "peach", "pewter", "pink", "plum",
    "purple", "rainbow", "red", "rose", "royal", "rust", "sand", "sapphire", "seashell", "silver", "skull",
    "slate", "steel", "stone", "stonewash", "sunflower", "tan", "taupe", "teal", "tiger", "turquoise", "violet",
    "walnut", "wheat", "white", "wine", "yellow",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goal:
    """What a customer asks for.

    goal_options: values wanted (goals that people wrote), or name -> value (synthetic goals); the two are compared
    differently. price_upper: dollars; 1,000,000 stands for no limit. weight: how often a random goal is this one.
    """

    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: tuple[str, ...]
    price_upper: float
    goal_options: tuple[str, ...] | Mapping[str, str]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Purchase:
    """What was bought: the product, at a price in dollars, with one value for each option chosen."""

    product: Product
    price: float
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RewardDetails:
    """The reward in [0, 1] and what it is made of.

    score = r_type * (attributes and options found, + 1 if the price fits) / (attributes and options wanted, + 1).
    r_att, r_option: share found; r_option is None when no option is wanted.
    """

    score: float
    r_type: float
    query_match: bool
    category_match: bool
    title_score: float
    r_att: float
    r_option: float | None
    r_price: bool


def compute_reward(
    purchase: Purchase, goal: Goal, nouns: NounExtractor, option_match: OptionMatch = "upstream"
) -> RewardDetails:
    """The reward of a purchase.

    Args:
        option_match: "upstream" compares options as WebShop does, by alike words after reducing values to a base
            color; "fixed" wants the same words under the same name (goals that people wrote: under any name).
    """
    query_match = purchase.product.query == goal.query
    category_match = len(_path(purchase.product.product_category) & _path(goal.product_category)) >= 2
    title_score = _title_score(purchase.product, goal, nouns)
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1
    if title_score == 0.0:
        r_type = 0.0
    num_attributes = sum(_has_attribute(purchase.product, wanted) for wanted in goal.attributes)
    num_options = _count_options(purchase.options, goal.goal_options, option_match)
    r_price = purchase.price <= goal.price_upper
    found = num_attributes + num_options + r_price
    return RewardDetails(
        score=found / (len(goal.attributes) + len(goal.goal_options) + 1) * r_type,
        r_type=r_type,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
        r_att=num_attributes / len(goal.attributes) if goal.attributes else 0.0,
        r_option=num_options / len(goal.goal_options) if goal.goal_options else None,
        r_price=r_price,
    )


def _path(product_category: str) -> set[str]:
    return {part.strip() for part in product_category.split("\u203a")}


def _title_score(product: Product, goal: Goal, nouns: NounExtractor) -> float:
    """Share of the wanted title's nouns (repeated ones counted each time) that the bought title has."""
    wanted = nouns.nouns(goal.asin, goal.name)
    if not wanted:
        return _NO_NOUNS_SCORE
    return len(set(wanted) & set(nouns.nouns(product.asin, product.title))) / len(wanted)


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(token_set_ratio(attribute, wanted) > _ALIKE for attribute in product.attributes):
        return True
    return (
        wanted in product.title.lower()
        or wanted in " ".join(product.bullets).lower()
        or wanted in product.description.lower()
    )


# -- options ------------------------------------------------------------------------------------------------------


def _base_color(value: str) -> str:
    """The first base color that occurs anywhere in a value, else the value."""
    return next((color for color in _COLORS if color in value), value)


def _wanted_texts(goal_options: tuple[str, ...] | Mapping[str, str]) -> list[str]:
    """The goal's side of the comparison.

    A synthetic goal's option is a pair: it becomes a color only if its name or its whole value is one; otherwise the
    text form of the pair is compared, with quotes, commas and the name.
    """
    if not isinstance(goal_options, Mapping):
        return [_base_color(value) for value in goal_options]
    return [next((color for color in _COLORS if color in pair), str(pair)) for pair in goal_options.items()]


def _count_options(
    bought: Mapping[str, str], goal_options: tuple[str, ...] | Mapping[str, str], option_match: OptionMatch
) -> int:
    return sum(len(accepted & set(bought.items())) > 0 for accepted in _accepted(bought, goal_options, option_match))


def _accepted(
    offered: Mapping[str, str] | set[tuple[str, str]],
    goal_options: tuple[str, ...] | Mapping[str, str],
    option_match: OptionMatch,
) -> list[set[tuple[str, str]]]:
    """For each option wanted, which of the offered (name, value) pairs satisfy it."""
    pairs = set(offered.items()) if isinstance(offered, Mapping) else offered
    if option_match == "upstream":
        return [
            {pair for pair in pairs if token_set_ratio(_base_color(pair[1]), wanted) > _ALIKE}
            for wanted in _wanted_texts(goal_options)
        ]
    if isinstance(goal_options, Mapping):
        return [
            {pair for pair in pairs if pair[0] == name and _same_value(pair[1], value)}
            for name, value in goal_options.items()
        ]
    return [{pair for pair in pairs if _same_value(pair[1], value)} for value in goal_options]


def _same_value(a: str, b: str) -> bool:
    if words(a) or words(b):
        return words(a) == words(b)
    return a.lower().split() == b.lower().split()  # neither has an ASCII word


def is_winnable(product: Product, price: float, goal: Goal, nouns: NounExtractor, option_match: OptionMatch) -> bool:
    """Whether buying the goal's own product with suitable options gives 1.0.

    Args:
        product, price: the goal's product and what it costs.
    """
    bare = compute_reward(Purchase(product, price, {}), goal, nouns, option_match)
    if bare.r_type < 1.0 or not bare.r_price or (goal.attributes and bare.r_att < 1.0):
        return False
    offered = {(name, value) for name, values in product.options for value in values}
    accepted = _accepted(offered, goal.goal_options, option_match)
    return _can_choose(sorted(accepted, key=len), {})


def _can_choose(accepted: list[set[tuple[str, str]]], chosen: dict[str, str]) -> bool:
    """Whether one value per name can satisfy all of `accepted`, given those chosen already."""
    if not accepted:
        return True
    first, rest = accepted[0], accepted[1:]
    if any(chosen.get(name) == value for name, value in first):
        return _can_choose(rest, chosen)
    return any(name not in chosen and _can_choose(rest, {**chosen, name: value}) for name, value in sorted(first))
