# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer fit for a shop knows as whole tokens: clicks, prices, sentences, words that belong together."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

__all__ = ["mine_clicks", "without_clicks", "words_that_stand_together"]

_PHRASE = re.compile(r"click\[[^\]\n]+\]|search\[| \$\d+|\.\d\d\b| \d+\.00 dollars")
_THOUGHT = re.compile(r"<think>([^<]+)")
_WITH_NUMBER = re.compile(r"click\[(?![a-z0-9]{10}\]).*\d.*\]")
_PAGE_SPECIFIC = re.compile(r"^>|\[|\$")
_WORDS = re.compile(r"[a-z]+(?: [a-z]+)+")
_OFTEN = 200  # a line is a phrase when it stands in one text of so many
_ROUNDS = 4  # of joining neighbours: up to 16 words


def mine_clicks(texts: Iterable[str], limit: int) -> list[str]:
    """What a shop's pages and the responses are made of: whole clicks, thoughts, prices in whole dollars, cents,
    options with numbers in them, sentences that stand on many pages, and words that stand together; most frequent
    first, at most `limit`.

    A click is then the same token on the page and in the response, whatever product or option it names, and an
    attribute the same in the request, the query and the title.
    """
    texts = list(texts)
    counts: Counter[str] = Counter(match[0] for text in texts for match in _PHRASE.finditer(text))
    counts.update(thought for text in texts for thought in _THOUGHT.findall(text))
    counts.update({f" {name[6:-1]}": count for name, count in counts.items() if _WITH_NUMBER.fullmatch(name)})
    lines = Counter(line for text in texts for line in text.split("\n") if not _PAGE_SPECIFIC.search(line))
    counts.update({line: count for line, count in lines.items() if count > len(texts) // _OFTEN})
    for phrase, count in words_that_stand_together(without_clicks(texts)).items():
        # Without the blank only at the start of a query.
        counts.update({f" {phrase}": count, phrase: count})
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [phrase for phrase, count in frequent if count > 1 and len(phrase) > 2][:limit]


def without_clicks(texts: Iterable[str]) -> list[str]:
    """What stands between clicks and prices: the words that the byte-level BPE has to learn."""
    return [piece for text in texts for piece in _PHRASE.split(text) if piece]


def words_that_stand_together(texts: Iterable[str], *, min_count: int = 15, min_share: float = 0.9) -> dict[str, int]:
    """Neighbouring lower-case words of which one hardly ever stands without the other ("rice bran"), with counts.

    Equal runs of words count once, so that a title on many pages is no phrase.

    Args:
        min_count: of the pair.
        min_share: count of the pair over the count of its rarer member.
    """
    runs = [run.split(" ") for run in sorted({match[0] for text in texts for match in _WORDS.finditer(text)})]
    counts: Counter[str] = Counter()
    for _ in range(_ROUNDS):
        counts = Counter(word for run in runs for word in run)
        pairs = Counter(pair for run in runs for pair in pairwise(run))
        joined = {
            pair
            for pair, count in pairs.items()
            if count >= min_count and count >= min_share * min(counts[pair[0]], counts[pair[1]])
        }
        if not joined:
            break
        runs = [_join(run, joined) for run in runs]
    counts = Counter(word for run in runs for word in run)
    return {word: count for word, count in counts.items() if " " in word and count >= min_count}


def _join(run: list[str], pairs: set[tuple[str, str]]) -> list[str]:
    """The run with each of the pairs as one word, from the left."""
    result: list[str] = []
    position = 0
    while position < len(run):
        pair = tuple(run[position : position + 2])
        if pair in pairs:
            result.append(" ".join(pair))
            position += 2
        else:
            result.append(run[position])
            position += 1
    return result
