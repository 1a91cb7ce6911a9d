# SPDX-License-Identifier: Apache-2.0
"""What an expert makes of a request: the words that must be found on a product's pages, and the price limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Request", "best_value", "parse_request", "price_bounds", "tokens"]

_TOKEN = re.compile(r"[a-z0-9]+(?:\.[0-9]+)?")
_PRICE_CLAUSE = re.compile(r",?\s*(?:and )?price lower than ([0-9.]+) dollars")
_PRICE = re.compile(r"\$([0-9.]+)")

_POLITE = frozenset(
    (
        "a", "about", "also", "am", "an", "and", "any", "are", "as", "asked", "at", "be", "but", "buy", "by",
        "can", "comes", "could", "every", "find", "for", "friend", "from", "get", "give", "good", "has", "have",
        "help", "hi", "i", "id", "im", "in", "is", "it", "its", "just", "like", "ll", "looking", "made", "me",
        "must", "my", "need", "needs", "of", "on", "one", "or", "please", "prefer", "preferably", "really", "s",
        "search", "show", "should", "so", "some", "that", "the", "them", "there", "these", "they", "this", "to",
        "up", "use", "ve", "very", "want", "wanted", "was", "we", "which", "with", "would", "you", "your", "hello",
        "thanks", "hunting", "something", "someone", "pair", "hoping",
    )
)  # fmt: skip
"""Words of asking, not of what is asked for."""


@dataclass(frozen=True, slots=True)
class Request:
    """words: all words in order. wanted: those that say what is asked for. limit: dollars, or None."""

    words: tuple[str, ...]
    wanted: tuple[str, ...]
    limit: float | None

    @property
    def query(self) -> str:
        """What to search for."""
        return " ".join(self.wanted)


def tokens(text: str) -> tuple[str, ...]:
    """Lower-case words and numbers of a text."""
    return tuple(_TOKEN.findall(text.lower()))


def parse_request(instruction: str) -> Request:
    """Take a request apart."""
    found = _PRICE_CLAUSE.search(instruction)
    limit = float(found[1]) if found else None
    words = tokens(_PRICE_CLAUSE.sub("", instruction))
    wanted = tuple(dict.fromkeys(word for word in words if word not in _POLITE))
    return Request(words, wanted or words, limit)


def price_bounds(tag: str) -> tuple[float, float]:
    """Lowest and highest price of a tag such as `$19.99` or `$1.01 to $1.74`; (0, 0) if it has none."""
    prices = [float(price) for price in _PRICE.findall(tag)]
    return (min(prices), max(prices)) if prices else (0.0, 0.0)


def best_value(values: Sequence[str], words: Sequence[str]) -> str | None:
    """The option value that a request names: the longest whose words occur there in a row; None if there is none."""
    text = f" {' '.join(words)} "
    named = [value for value in values if tokens(value) and f" {' '.join(tokens(value))} " in text]
    return max(named, key=lambda value: len(tokens(value)), default=None)
