# SPDX-License-Identifier: Apache-2.0
"""Text to search terms, as Lucene's standard tokenizer and its English analyzer do it (UAX #29 word boundaries)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import regex

from agent_system.environments.env_package.webshop.stemmer import stem

__all__ = ["STOP_WORDS", "analyze"]

STOP_WORDS = frozenset(
    (
        "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not",
        "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was",
        "will", "with",
    )
)  # fmt: skip
_POSSESSIVES = ("'s", "\u2019s", "\uff07s")
_LONGEST_TOKEN = 255
_MEMORY = 1 << 16


def _build_pattern() -> regex.Pattern[str]:
    """A token is one word, one ideograph, or one emoji sequence; names follow the classes of UAX #29."""
    marks = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*"
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{marks}"
    digit = rf"\p{{WB=Numeric}}{marks}"
    katakana = rf"\p{{WB=Katakana}}{marks}"
    low_line = rf"\p{{WB=ExtendNumLet}}{marks}"
    in_word = rf"[:\p{{WB=MidLetter}}\p{{WB=MidNumLet}}']{marks}"
    in_number = rf"[,;\p{{WB=MidNum}}\p{{WB=MidNumLet}}']{marks}"
    run = rf"(?:{letter}(?:{in_word}(?={letter}))?|{digit}(?:{in_number}(?={digit}))?)+"
    core = rf"(?:(?:{katakana})+|{run})"
    # The look-behind keeps a long run of low lines (and marks) alone from being tried from each of its places.
    start = rf"(?:(?<![\p{{WB=ExtendNumLet}}\p{{WB=Extend}}\p{{WB=Format}}\p{{WB=ZWJ}}])(?:{low_line})++)?"
    word = rf"{start}{core}(?:(?:{low_line})++{core})*+(?:{low_line})*+"
    ideograph = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{marks}"
    # Pictographs of the Unicode version that Lucene knows, among them (c), (r) and (tm); later versions removed some.
    removed = r"\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2763-\u2767"
    pictograph = rf"[\p{{Extended_Pictographic}}{removed}]"
    emoji = rf"{pictograph}{marks}(?:(?<=\u200d){pictograph}{marks})*|\p{{Regional_Indicator}}{{2}}{marks}"
    complex_script = r"[\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]+"
    return regex.compile(rf"{word}|{ideograph}|{complex_script}|{emoji}", regex.V1)


_TOKEN = _build_pattern()


@lru_cache(maxsize=_MEMORY)
def _term(token: str) -> str:
    """The term of a token; empty for a stop word."""
    token = token.lower()
    if token.endswith(_POSSESSIVES):
        token = token[:-2]
    return "" if token in STOP_WORDS else stem(token)


def _split_long(token: str) -> Iterator[str]:
    for start in range(0, len(token), _LONGEST_TOKEN):
        yield token[start : start + _LONGEST_TOKEN]


def analyze(text: str) -> list[str]:
    """The terms of a text in order, stop words left out."""
    terms = []
    for token in _TOKEN.findall(text):
        if len(token) > _LONGEST_TOKEN:
            terms += [term for part in _split_long(token) if (term := _term(part))]
        elif term := _term(token):
            terms.append(term)
    return terms
