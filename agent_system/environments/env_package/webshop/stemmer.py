# SPDX-License-Identifier: Apache-2.0
"""Porter's English stemmer (Porter 1980, "An algorithm for suffix stripping") with his two later departures.

The departures are `bli -> ble` (instead of `abli -> able`) and `logi -> log`, as in his own later programs and in
Lucene. Words of one or two characters stay as they are.
"""

from __future__ import annotations

__all__ = ["stem"]

_STEP2 = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble"),
    ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate"),
    ("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"),
    ("iviti", "ive"), ("biliti", "ble"), ("logi", "log"),
)  # fmt: skip
_STEP3 = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", ""),
)  # fmt: skip
_STEP4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
)  # fmt: skip


def _shape(word: str) -> str:
    """One letter per character: v for a vowel, c for anything else; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        is_vowel = letter in "aeiou" or (letter == "y" and shape[-1:] == "c")
        shape += "v" if is_vowel else "c"
    return shape


def _measure(stem_part: str) -> int:
    """Porter's m: how often a vowel is followed by a consonant."""
    return _shape(stem_part).count("vc")


def _ends_in_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _ends_in_cvc(word: str) -> bool:
    return _shape(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _plural(word: str) -> str:
    if word.endswith("sses") or word.endswith("ies"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past_and_progressive(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    suffix = "ed" if word.endswith("ed") else "ing" if word.endswith("ing") else ""
    if not suffix or "v" not in _shape(word[: -len(suffix)]):
        return word
    word = word[: -len(suffix)]
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_in_double(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_in_cvc(word) else word


def _map_suffix(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    """Apply the rule of the longest suffix that fits, if what is left has m > 0."""
    found = max((rule for rule in rules if word.endswith(rule[0])), key=lambda rule: len(rule[0]), default=None)
    if found is None:
        return word
    rest = word[: -len(found[0])]
    return rest + found[1] if _measure(rest) > 0 else word


def _drop_suffix(word: str) -> str:
    suffix = max((s for s in _STEP4 if word.endswith(s)), key=len, default="")
    if not suffix:
        return word
    rest = word[: -len(suffix)]
    if suffix == "ion" and rest[-1:] not in ("s", "t"):
        return word
    return rest if _measure(rest) > 1 else word


def _tidy(word: str) -> str:
    if word.endswith("e"):
        m = _measure(word[:-1])
        if m > 1 or (m == 1 and not _ends_in_cvc(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def stem(word: str) -> str:
    """The stem of a lower-case word; characters other than a, e, i, o, u, y count as consonants."""
    if len(word) <= 2:
        return word
    word = _past_and_progressive(_plural(word))
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    return _tidy(_drop_suffix(_map_suffix(_map_suffix(word, _STEP2), _STEP3)))
