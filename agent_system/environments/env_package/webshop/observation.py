# SPDX-License-Identifier: Apache-2.0
"""Pages as text: the parts of each page in order, and the two forms in which WebShop shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from agent_system.environments.env_package.webshop.catalogue import Listing
from agent_system.environments.env_package.webshop.products import Product

__all__ = [
    "BACK",
    "BUY",
    "NEXT",
    "PREVIOUS",
    "SUB_PAGES",
    "ObservationMode",
    "Part",
    "done_page",
    "index_page",
    "item_page",
    "render",
    "results_page",
    "sub_page",
]

ObservationMode = Literal["text", "text_rich"]

BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")

_BLANKS = " \t\n\r\f"
_SEPARATOR = " [SEP] "
_SCRIPT_SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})


class Part(NamedTuple):
    """A piece of a page: plain text, a button, a link to a product, or an option value."""

    kind: Literal["text", "button", "link", "option"]
    text: str


def _texts(*texts: str) -> list[Part]:
    return [Part("text", text) for text in texts]


def _buttons(*texts: str) -> list[Part]:
    return [Part("button", text) for text in texts]


def _head(instruction: str) -> list[Part]:
    return _texts("Instruction:", instruction) + _buttons(BACK)


def index_page(instruction: str) -> list[Part]:
    """The page with the search bar."""
    return _texts("WebShop", "Instruction: ", instruction) + _buttons("Search")


def results_page(instruction: str, page: int, total: int, listings: Sequence[Listing]) -> list[Part]:
    """Page `page` (from 1) of `total` hits."""
    parts = _head(instruction) + _texts(f"Page {page} (Total results: {total})")
    parts += _buttons(PREVIOUS, NEXT) if page > 1 else _buttons(NEXT)
    for listing in listings:
        parts += [Part("link", listing.asin), *_texts(listing.title, listing.price_tag)]
    return parts


def item_page(instruction: str, product: Product, show_attributes: bool) -> list[Part]:
    """A product with its options."""
    parts = _head(instruction) + _buttons(PREVIOUS)
    for name, values in product.options:
        parts += [*_texts(name), *(Part("option", value) for value in values)]
    parts += _texts(product.title, f"Price: {product.price_tag}", "Rating: N.A.")
    return parts + _buttons(*(SUB_PAGES if show_attributes else SUB_PAGES[:-1]), BUY)


def sub_page(instruction: str, product: Product, name: str) -> list[Part]:
    """One of `SUB_PAGES`."""
    parts = _head(instruction) + _buttons(PREVIOUS)
    if name == "Description":
        return parts + _texts(product.description)
    if name == "Features":
        return parts + _texts(*(f" {bullet}" for bullet in product.bullets))
    if name == "Attributes":
        attributes = (f" {attribute}" for attribute in product.attributes)
        return parts + _texts(*attributes, product.category, product.query, product.product_category)
    return parts  # no reviews are loaded


def done_page(asin: str, options: Mapping[str, str], score: float) -> list[Part]:
    """What WebShop shows after a purchase, its spelling kept."""
    chosen = json.dumps(dict(options), sort_keys=True).translate(_SCRIPT_SAFE)
    return _texts(
        "Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)", "Purchased",
        "asin", asin, "options", chosen, "attrs", "None", "category", "None", "query", "None", "product category",
        "None", "Target", "asin", "options", "attrs", "price upper", "instuction text", "category",
        "product category", "query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(score),
        "Reward Details ", "None",
    )  # fmt: skip


def _visible(parts: Sequence[Part]) -> list[Part]:
    """Without empty parts; one of blanks only is dropped with a line break in it and is one blank otherwise."""
    kept = []
    for part in parts:
        if part.text.strip(_BLANKS):
            kept.append(part)
        elif part.text and "\n" not in part.text:
            kept.append(Part(part.kind, " "))
    return kept


def render(
    parts: Sequence[Part], mode: ObservationMode, address: str = "", visited: frozenset[str] = frozenset()
) -> str:
    """A page as the agent sees it.

    Args:
        mode: "text" joins the stripped parts by ` [SEP] `; "text_rich" gives each a line, with marks for what can be
            clicked and what was.
        address: the page's address (text_rich): an option value that stands there in quotes counts as selected.
        visited: asins of the products opened before (text_rich).
    """
    parts = _visible(parts)
    if mode == "text":
        return _SEPARATOR.join(part.text.strip() for part in parts)
    lines, selected = [], []
    for kind, text in parts:
        if kind == "button":
            lines.append(f"[button] {text} [button_]\n")
        elif kind == "link":
            mark = "clicked button" if text in visited else "button"
            lines.append(f"\n[{mark}] {text} [{mark}_]\n")
        elif kind == "text":
            lines.append(f"{text}\n")
        elif f'"{text}"' in address:
            selected.append(f"You have clicked {text}.\n")
            lines.append(f"  [clicked button] {text} [clicked button_]\n")
        else:
            lines.append(f"  [button] {text} [button_]\n")
    return "".join(selected[::-1] + lines)
