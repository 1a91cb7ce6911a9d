# SPDX-License-Identifier: Apache-2.0
"""How alike two phrases are as sets of words: thefuzz's `token_set_ratio`, which WebShop's reward uses."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["token_set_ratio", "words"]

_NOT_WORD = re.compile(r"[^a-z0-9]+")
_MEMORY = 1 << 11


@lru_cache(maxsize=_MEMORY)
def words(text: str) -> tuple[str, ...]:
    """The words of a text in order: lower-case runs of ASCII letters and digits; other ASCII separates, the rest is
    dropped without separating."""
    return tuple(_NOT_WORD.sub(" ", text.encode("ascii", "ignore").decode("ascii").lower()).split())


def _common(a: str, b: str) -> int:
    """Length of the longest common subsequence, with a bit per character of `a` (Hyyro 2004)."""
    places: dict[str, int] = {}
    for position, character in enumerate(a):
        places[character] = places.get(character, 0) | (1 << position)
    everywhere = (1 << len(a)) - 1
    row = everywhere
    for character in b:
        match = row & places.get(character, 0)
        row = ((row + match) | (row - match)) & everywhere
    return len(a) - row.bit_count()


def _ratio(a: str, b: str) -> float:
    """100 * 2 LCS / (length of both); 0 if one is empty."""
    if not a or not b:
        return 0.0
    return 100.0 if a == b else 200.0 * _common(a, b) / (len(a) + len(b))


@lru_cache(maxsize=_MEMORY)
def token_set_ratio(a: str, b: str) -> int:
    """0 to 100: the best ratio between the common words alone and with either side's other words, words sorted.

    0 if a side has no word; 100 if all words of one side are on the other.
    """
    left, right = frozenset(words(a)), frozenset(words(b))
    if not left or not right:
        return 0
    both = " ".join(sorted(left & right))
    one = " ".join(part for part in (both, " ".join(sorted(left - right))) if part)
    other = " ".join(part for part in (both, " ".join(sorted(right - left))) if part)
    return round(max(_ratio(both, one), _ratio(both, other), _ratio(one, other)))
