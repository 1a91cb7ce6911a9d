# SPDX-License-Identifier: Apache-2.0
"""What the shop knows of one product, and how it is read from WebShop's product and attribute files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.utils.errors import UserError

__all__ = ["DUMMY_ATTRIBUTE", "AttributeEntry", "Product", "parse_attribute_entry", "parse_product", "string_list"]

DUMMY_ATTRIBUTE = "DUMMY_ATTR"
"""Only attribute of a product that the attribute file does not know."""

_LONGEST_ASIN = 10
_DEFAULT_PRICE = 100.0
_NOT_PRICE = re.compile(r"[^\d.]")


@dataclass(frozen=True, slots=True)
class Product:
    """One product.

    prices: one price or the two ends of a range, in dollars. options: (name, values), lower case, in the file's order.
    """

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    prices: tuple[float, ...]
    category: str
    query: str
    product_category: str

    @property
    def price_tag(self) -> str:
        """As the shop shows it: `$19.99`, `$100.0` or `$1.01 to $1.74`."""
        return " to ".join(f"${price}" for price in self.prices)

    def search_text(self) -> str:
        """The document that search looks into: title, description, first bullet, options; lower case."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options)
        first = self.bullets[0] if self.bullets else ""
        return f"{self.title} {self.description} {first} {options}".lower()


@dataclass(frozen=True, slots=True)
class AttributeEntry:
    """A product's attributes, and the text and attributes of its synthetic goals (empty text: no goals)."""

    attributes: tuple[str, ...]
    instruction: str
    instruction_attributes: tuple[str, ...]


def _wrong(place: str, field: str, value: Any, expected: str) -> UserError:
    found = "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
    return UserError(f"{place}: field `{field}` is {found}, expected {expected}.")


def _text(record: Mapping[str, Any], field: str, place: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise _wrong(place, field, value, "a string")
    return value


def string_list(record: Mapping[str, Any], field: str, place: str) -> tuple[str, ...]:
    """A field that must be a list of strings.

    Raises:
        UserError: it is not; names `place` and the field.
    """
    value = record.get(field)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(place, field, value, "a list of strings")
    return tuple(value)


def parse_attribute_entry(record: Any, place: str) -> AttributeEntry:
    """An entry of `items_ins_v2`.

    Raises:
        UserError: the entry has another form; names `place` (file and product) and the field.
    """
    if not isinstance(record, dict):
        raise _wrong(place, "(entry)", record, "an object")
    instruction = _text(record, "instruction", place) if record.get("instruction") is not None else ""
    wanted = string_list(record, "instruction_attributes", place) if instruction else ()
    return AttributeEntry(string_list(record, "attributes", place), instruction, wanted)


def parse_product(record: Any, attributes: Mapping[str, AttributeEntry], place: str) -> Product | None:
    """An element of `items_shuffle`; None for one that the shop leaves out (no usable asin).

    Raises:
        UserError: the element has another form; names `place` (file and position) and the field.
    """
    if not isinstance(record, dict):
        raise _wrong(place, "(product)", record, "an object")
    asin = _text(record, "asin", place)
    if asin == "nan" or len(asin) > _LONGEST_ASIN:
        return None
    place = f"{place} ({asin})"
    if not (asin.isascii() and asin.isalnum() and asin == asin.upper()):
        raise _wrong(place, "asin", asin, "up to 10 capital letters and digits")
    bullets = record.get("small_description")
    entry = attributes.get(asin)
    return Product(
        asin=asin,
        title=_text(record, "name", place),
        description=_text(record, "full_description", place),
        bullets=(bullets,) if isinstance(bullets, str) else string_list(record, "small_description", place),
        attributes=(DUMMY_ATTRIBUTE,) if entry is None else entry.attributes,
        options=_options(record.get("customization_options"), place),
        prices=_prices(record.get("pricing"), place),
        category=_text(record, "category", place),
        query=_text(record, "query", place).lower().strip(),
        product_category=_text(record, "product_category", place),
    )


def _options(value: Any, place: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not value:
        return ()
    if not isinstance(value, dict):
        raise _wrong(place, "customization_options", value, "an object or nothing")
    options: dict[str, tuple[str, ...]] = {}
    for name, entries in value.items():
        if entries is None:
            continue
        field = f"customization_options.{name}"
        if not isinstance(entries, list):
            raise _wrong(place, field, entries, "a list")
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("value"), str):
                raise _wrong(place, f"{field}[].value", entry, "objects with a string `value`")
        options[name.lower()] = tuple(entry["value"].strip().replace("/", " | ").lower() for entry in entries)
    return tuple(options.items())


def _prices(value: Any, place: str) -> tuple[float, ...]:
    if not value:
        return (_DEFAULT_PRICE,)
    if not isinstance(value, str):
        raise _wrong(place, "pricing", value, "a text such as $12.99")
    try:
        prices = tuple(float(_NOT_PRICE.sub("", part)) for part in value.split("$")[1:])
    except ValueError:
        prices = ()
    if not prices:
        raise _wrong(place, "pricing", value, "a text such as $12.99")
    return prices[:2]
