# SPDX-License-Identifier: Apache-2.0
"""Similarity grouping: the clusters of the plain double loop, with a fraction of its comparisons."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.gigpo import similarity
from recipe.gigpo.core_gigpo import are_similar, build_step_group
from tests.helpers import per_row

THRESHOLDS = st.sampled_from([0.05, 0.3, 0.5, 2 / 3, 0.8, 0.9, 0.95, 0.99])
# Few letters make many near misses; the last alphabet holds characters outside the 16-bit plane.
TEXTS = st.text("ab ", max_size=12) | st.text("abcdefgh", max_size=30) | st.text("\U0001f600\u6211\udc80z", max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.sampled_from("xy")), max_size=14), THRESHOLDS)
def test_clusters_are_those_of_the_double_loop(given_rows: list[tuple[str, str]], threshold: float) -> None:
    texts, tasks = [text for text, _ in given_rows], [task for _, task in given_rows]
    got = build_step_group(texts, tasks, True, threshold)
    assert got.tolist() == per_row.similarity_groups(texts, tasks, threshold)


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS, THRESHOLDS)
def test_are_similar_is_the_matchers_ratio(a: str, b: str, threshold: float) -> None:
    assert are_similar(a, b, threshold) == (difflib.SequenceMatcher(None, a, b).ratio() >= threshold)


def edited(rng: np.random.Generator, text: str) -> str:
    characters = list(text)
    for _ in range(int(rng.integers(0, 25))):
        place = int(rng.integers(0, len(characters)))
        if rng.random() < 0.5:
            del characters[place]
        else:
            characters.insert(place, "abc "[int(rng.integers(0, 4))])
    return "".join(characters)


def observations(count: int, words: int) -> list[str]:
    """Texts of 200 characters and more, where the matcher ignores frequent characters, most of them variants."""
    rng = np.random.default_rng(words)
    names = ["".join(rng.choice(list("abcdefghij"), int(rng.integers(1, 7)))) for _ in range(50)]
    originals = [" ".join(rng.choice(names, words)) for _ in range(5)]
    return [edited(rng, originals[int(rng.integers(0, 5))]) for _ in range(count)]


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.9, 0.95])
@pytest.mark.parametrize("words", [20, 70])
def test_long_texts(words: int, threshold: float) -> None:
    texts, tasks = observations(40, words), ["a", "b"] * 20
    assert build_step_group(texts, tasks, True, threshold).tolist() == per_row.similarity_groups(
        texts, tasks, threshold
    )


def test_most_comparisons_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 variants of 5 texts, each 10 times: equal texts are compared once, dissimilar ones by their counts."""
    calls: list[int] = []
    ratio = similarity._Representative.is_similar

    def counted(self: similarity._Representative, text: str, threshold: float) -> bool:
        calls.append(1)
        return ratio(self, text, threshold)

    monkeypatch.setattr(similarity._Representative, "is_similar", counted)
    texts = observations(40, 70)
    groups = build_step_group(texts * 10, ["g"] * 400, True, 0.8)
    clusters = len(set(groups.tolist()))
    assert groups[:40].tolist() * 10 == groups.tolist()
    assert len(calls) < 40 * clusters / 2


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.5, 1.5])
def test_threshold_out_of_range(threshold: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        build_step_group(["a"], ["g"], True, threshold)


@pytest.mark.parametrize("texts", [[1, 2], [np.zeros(2), np.ones(2)], ["a", None]])
def test_only_text_has_similarity(texts: Sequence[object]) -> None:
    with pytest.raises(ValueError, match="enable_similarity=False"):
        build_step_group(texts, ["g", "g"], True, 0.9)
    with pytest.raises(ValueError, match="compares texts"):
        are_similar("a", 1)  # type: ignore[arg-type]
