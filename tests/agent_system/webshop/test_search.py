# SPDX-License-Identifier: Apache-2.0
"""Search: terms as Lucene makes them, scores as the formula says, an index that survives races and damage."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.environments.env_package.webshop.analyzer import analyze
from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.search import IndexBuilder, SearchIndex, quantised_length
from agent_system.environments.env_package.webshop.stemmer import stem
from verl.utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The women's 3.5 inch dual-usb hub", ["women", "3.5", "inch", "dual", "usb", "hub"]),
        ("o'neil\u2019s can't foo_bar x:y 1,000.5 a.b.", ["o'neil", "can't", "foo_bar", "x:y", "1,000.5", "a.b"]),
        ("technology assembly relational hopping agreed", ["technolog", "assembl", "relat", "hop", "agre"]),
        ("\u2605great\u2122 caf\u00e9 \u00ae \u2013", ["\u2605", "great", "\u2122", "caf\u00e9", "\u00ae"]),
        ("\u65e5\u672c \u30ab\u30bf \u3072\u3089", ["\u65e5", "\u672c", "\u30ab\u30bf", "\u3072", "\u3089"]),
        ("it is not for us, and no", ["us"]),
        ("x" * 300, ["x" * 255, "x" * 45]),
        ("___ - !", []),
    ],
)  # fmt: skip
def test_terms(text: str, terms: list[str]) -> None:
    assert analyze(text) == terms


@pytest.mark.parametrize("piece", ["_", "_\u0301", "a_", "a:", "1,", "\u0301", "\u2764\u200d", "-", "a", "\u30ab_"])
def test_terms_of_odd_texts_take_no_time(piece: str) -> None:
    """Queries come from a model: no text may make the search hang."""
    start = time.perf_counter()
    analyze(piece * 20_000)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("caresses", "caress"), ("ponies", "poni"), ("feed", "feed"), ("plastered", "plaster"), ("motoring", "motor"),
        ("sing", "sing"), ("conflated", "conflat"), ("sized", "size"), ("falling", "fall"), ("happy", "happi"),
        ("sky", "sky"), ("vietnamization", "vietnam"), ("conformabli", "conform"), ("hopefulness", "hope"),
        ("electrical", "electr"), ("adjustment", "adjust"), ("adoption", "adopt"), ("probate", "probat"),
        ("controll", "control"), ("is", "is"), ("by", "by"), ("yes", "ye"), ("possibly", "possibl"),
    ],
)  # fmt: skip
def test_stems(word: str, expected: str) -> None:
    assert stem(word) == expected


def test_lengths_keep_four_bits() -> None:
    assert [quantised_length(n) for n in (0, 1, 23, 24, 39, 40, 41, 42, 57, 1000)] == [
        0, 1, 23, 24, 39, 40, 40, 42, 56, 984,
    ]  # fmt: skip
    values = [quantised_length(n) for n in range(5000)]
    assert values == sorted(values) and all(quantised_length(v) == v for v in values)


_WORDS = st.sampled_from(["lamp", "rug", "oak", "desk", "pine", "cup", "of", "silver", "green", "tea", "set"])
_TEXTS = st.lists(st.lists(_WORDS, max_size=60).map(" ".join), min_size=1, max_size=12)


def _naive_scores(texts: list[str], query: str) -> list[float]:
    documents = [analyze(text) for text in texts]
    filled = [d for d in documents if d]
    average = sum(map(len, documents)) / max(len(filled), 1)
    scores = [0.0] * len(texts)
    for term, count in Counter(analyze(query)).items():
        df = sum(term in d for d in documents)
        if df:
            idf = math.log(1 + (len(filled) - df + 0.5) / (df + 0.5))
            for place, d in enumerate(documents):
                norm = 0.9 * (1 - 0.4 + 0.4 * quantised_length(len(d)) / average)
                scores[place] += count * idf * (1 - 1 / (1 + d.count(term) / norm))
    return scores


@settings(deadline=None, max_examples=150)
@given(texts=_TEXTS, query=st.lists(_WORDS, max_size=6).map(" ".join), seed=st.integers(0, 3))
def test_scores_follow_the_formula(texts: list[str], query: str, seed: int) -> None:
    rank = np.random.default_rng(seed).permutation(len(texts)).astype(np.int32)
    builder = IndexBuilder()
    for text in texts:
        builder.add(text)
    hits = SearchIndex.from_arrays(builder.build(rank)).search(query).tolist()
    scores = _naive_scores(texts, query)
    assert set(hits) == {place for place, score in enumerate(scores) if score > 0}
    for first, second in pairwise(hits):
        assert scores[first] >= scores[second] - 1e-6
        if texts[first] == texts[second]:
            assert rank[first] < rank[second]


def test_only_the_best_fifty_with_ties_by_asin() -> None:
    builder = IndexBuilder()
    for number in range(200):
        builder.add("green lamp" if number % 2 else "green lamp lamp")
    rank = np.arange(200, dtype=np.int32)[::-1].copy()
    index = SearchIndex.from_arrays(builder.build(rank))
    assert index.search("lamp").tolist() == list(range(198, 98, -2))
    assert index.search("nothing here").tolist() == [] and index.search("").tolist() == []


_OPEN = """
import sys
from agent_system.environments.env_package.webshop.catalogue import Catalogue
catalogue = Catalogue.load(sys.argv[1], cache_dir=sys.argv[2])
print(catalogue.hash, catalogue.search("lamp").tolist())
"""


def test_two_processes_build_at_once(generated_dir: Path, tmp_path: Path, catalogue: Catalogue) -> None:
    command = [sys.executable, "-c", _OPEN, str(generated_dir), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outputs.append(out.strip())
    assert outputs == [f"{catalogue.hash} {catalogue.search('lamp').tolist()}"] * 2
    assert len(list(tmp_path.iterdir())) == 1, "temporary folders are left"


def test_the_index_depends_on_the_content(generated_dir: Path, tmp_path: Path, catalogue: Catalogue) -> None:
    part = Catalogue.load(generated_dir, num_products=30, nouns=catalogue.nouns, cache_dir=tmp_path)
    whole = Catalogue.load(generated_dir, nouns=catalogue.nouns, cache_dir=tmp_path)
    assert (len(part), len(whole)) == (30, len(catalogue)) and part.hash != whole.hash == catalogue.hash
    assert part.search("for").max(initial=0) < 30


def test_a_place_that_cannot_be_written_is_named(generated_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        Catalogue.load(generated_dir, cache_dir=tmp_path / "file")
