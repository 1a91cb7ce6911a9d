# SPDX-License-Identifier: Apache-2.0
"""Products of a generated shop, in families whose members look alike and differ in one thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from agent_system.environments.env_package.webshop.random_source import Draws
from agent_system.environments.env_package.webshop.shop_tables import (
    CATEGORIES,
    FILLERS,
    LINES,
    SYLLABLES,
    Category,
    Kind,
)

__all__ = ["FamilyKind", "MadeProduct", "make_products"]

FamilyKind = Literal["single", "attribute", "option", "price", "crowd"]

_FAMILY_SHARES: tuple[tuple[FamilyKind, float], ...] = (
    ("single", 0.34), ("attribute", 0.22), ("option", 0.22), ("price", 0.18), ("crowd", 0.04),
)  # fmt: skip
_FAMILY_SIZES: dict[FamilyKind, tuple[int, int]] = {
    "single": (1, 1), "attribute": (2, 3), "option": (2, 4), "price": (2, 4), "crowd": (12, 22),
}  # fmt: skip
# Far enough apart that a price limit (at most 40 dollars above the price) tells the members from each other.
_PRICE_GAP = 45
_RANGE_SHARE = 0.08
_IN_DESCRIPTION_SHARE = 0.2
_ASIN_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class MadeProduct:
    """One product and what its goals need to know.

    signature: the attribute in the title. hidden: attributes that the text mentions, (attribute, in the description
    instead of the features). telling: the attribute or option value that tells the member from its family.
    price: dollars, lowest and highest (equal for one price).
    """

    asin: str
    family: FamilyKind
    kind: Kind
    category: Category
    brand: str
    line: str
    use: str
    signature: str
    hidden: tuple[tuple[str, bool], ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    price: tuple[float, float]
    fillers: tuple[str, ...]
    telling: str = ""

    @property
    def attributes(self) -> tuple[str, ...]:
        """All attributes."""
        return (self.signature, *(attribute for attribute, _ in self.hidden))

    @property
    def title(self) -> str:
        """Brand, line, signature attribute and kind, as every member of the family has it."""
        return f"{self.brand} {self.line} {self.signature.title()} {self.kind.name.title()} for {self.use}"

    @property
    def nouns(self) -> tuple[str, ...]:
        """Nouns of the title, lower case."""
        return (self.brand.lower(), *self.signature.split(), *self.kind.name.split())

    def record(self, page: int) -> dict[str, object]:
        """The product in the schema of the product file."""
        in_features = [attribute for attribute, in_description in self.hidden if not in_description]
        in_description = [attribute for attribute, in_description in self.hidden if in_description]
        description = f"A {self.kind.name} by {self.brand}, made for {self.use}. {self.fillers[0]}"
        if in_description:
            description += f" Good to know: {', '.join(in_description)}."
        bullets = [f"{self.line} {self.kind.name} for {self.use}", self.fillers[1]]
        bullets += [f"{attribute.title()}: part of the {self.line} line" for attribute in in_features]
        bullets.append(self.fillers[2])
        low, high = self.price
        return {
            "asin": self.asin,
            "name": self.title,
            "full_description": description,
            "small_description": bullets,
            "pricing": f"${low:.2f}" if low == high else f"${low:.2f}$${high:.2f}".replace("$$", "$"),
            "images": [f"https://shop.invalid/{self.asin}.jpg"],
            "product_category": " \u203a ".join((self.category.root, *self.kind.path, self.kind.query.title())),
            "category": self.category.name,
            "query": self.kind.query,
            "customization_options": {
                name: [{"value": value, "is_selected": False, "url": None} for value in values]
                for name, values in self.options
            }
            or "",
            "average_rating": "",
            "page": page,
        }


def make_products(count: int, seed: int) -> Iterator[list[MadeProduct]]:
    """`count` products, family by family; every family has its own random stream."""
    kinds = [(category, kind) for category in CATEGORIES for kind in category.kinds]
    rounds: dict[int, list[str]] = {}
    asins = _Asins(seed)
    made = number = 0
    while made < count:
        # Kinds take turns, and within a kind the signatures, so that requests meet few families beside their own.
        place = number % len(kinds)
        category, kind = kinds[place]
        if not rounds.get(place):
            rounds[place] = Draws(seed, "signatures", place, number).shuffled(category.signatures)
        family = _make_family(category, kind, rounds[place].pop(), Draws(seed, "family", number))[: count - made]
        # Equal pages rank by asin: in a crowd the dear members come first.
        names = sorted(asins.take() for _ in family)
        yield [replace(product, asin=asin) for product, asin in zip(family, names, strict=True)]
        made += len(family)
        number += 1


def _make_family(category: Category, kind: Kind, signature: str, draws: Draws) -> list[MadeProduct]:
    family: FamilyKind = draws.weighted(_FAMILY_SHARES)
    size = draws.integer(*_FAMILY_SIZES[family])
    hidden = draws.sample(category.hidden, 2 + size) if family == "attribute" else draws.sample(category.hidden, 3)
    common = tuple((attribute, draws.chance(_IN_DESCRIPTION_SHARE)) for attribute in hidden[:2])
    low = draws.integer(*kind.price)
    base = MadeProduct(
        asin="",
        family=family,
        kind=kind,
        category=category,
        brand="".join(draws.pick(part) for part in SYLLABLES),
        line=draws.pick(LINES),
        use=draws.pick(kind.uses),
        signature=signature,
        hidden=common,
        options=_draw_options(kind, draws),
        price=_price_near(low, draws),
        fillers=tuple(draws.sample(FILLERS, 3)),
    )
    if family == "single":
        return [base]
    if family == "attribute":
        # What only some members have is never in the description, which search would find.
        return [
            replace(base, hidden=(*common, (own, False)), telling=own, price=_price_near(low, draws))
            for own in hidden[2:]
        ]
    if family == "option":
        return _option_members(base, size, draws)
    prices = [low + _PRICE_GAP * step for step in range(size)] if family == "price" else _crowd_prices(low, size, draws)
    order = draws.shuffled(prices) if family == "price" else prices
    return [replace(base, price=_price_near(price, draws)) for price in order]


def _option_members(base: MadeProduct, size: int, draws: Draws) -> list[MadeProduct]:
    """Members that offer the same but for one value each, which no other member has."""
    place = draws.integer(0, len(base.options) - 1)
    name, offered = base.options[place]
    pool = [value for value in dict(base.kind.options)[name] if value not in offered]
    own_values = draws.sample(pool, size) if len(pool) >= 2 else list(offered)
    members = []
    for own in own_values[:size]:
        shared = [value for value in offered if value not in own_values]
        values = tuple(draws.shuffled([*shared, own]))
        options = (*base.options[:place], (name, values), *base.options[place + 1 :])
        members.append(replace(base, options=options, telling=own, price=base.price))
    return members


def _draw_options(kind: Kind, draws: Draws) -> tuple[tuple[str, tuple[str, ...]], ...]:
    chosen = [option for option in kind.options if draws.chance(0.8)] or [draws.pick(kind.options)]
    drawn = []
    for name, values in chosen:
        kept = set(draws.sample(range(len(values)), draws.integer(2, min(6, len(values) - 1))))
        drawn.append((name, tuple(value for place, value in enumerate(values) if place in kept)))
    return tuple(drawn)


def _crowd_prices(low: int, size: int, draws: Draws) -> list[int]:
    """Mostly dear, in the order of the asins; only the last one or two are cheap."""
    cheap = draws.integer(1, 2)
    dear = [low + _PRICE_GAP + draws.integer(0, 60) for _ in range(size - cheap)]
    return dear + [low + draws.integer(0, 3) for _ in range(cheap)]


def _price_near(dollars: int, draws: Draws) -> tuple[float, float]:
    low = dollars + draws.pick((0.49, 0.79, 0.95, 0.99))
    if not draws.chance(_RANGE_SHARE):
        return low, low
    return low, low + draws.integer(2, 8)


class _Asins:
    """Asins in a random stream, none twice."""

    def __init__(self, seed: int) -> None:
        self._draws = Draws(seed, "asins")
        self._taken: set[str] = set()

    def take(self) -> str:
        """A new asin: `G` and nine letters or digits."""
        while True:
            asin = "G" + "".join(self._draws.pick(_ASIN_LETTERS) for _ in range(9))
            if asin not in self._taken:
                self._taken.add(asin)
                return asin
