# SPDX-License-Identifier: Apache-2.0
"""The reward: hand-worked cases of every rule, properties, and what is winnable against trying everything."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.environments.env_package.webshop import nouns as nouns_module
from agent_system.environments.env_package.webshop.fuzzy import token_set_ratio
from agent_system.environments.env_package.webshop.nouns import ContentWords, NounTable, SpacyNouns, default_nouns
from agent_system.environments.env_package.webshop.products import Product
from agent_system.environments.env_package.webshop.reward import (
    Goal,
    OptionMatch,
    Purchase,
    RewardDetails,
    compute_reward,
    is_winnable,
)
from verl.utils.errors import UserError

PATH = "Home \u203a Furniture \u203a Tables"
PRODUCT = Product(
    asin="A1", title="Oak Desk Lamp", description="Made of Solid Oak.", bullets=("Easy Assembly", "warm light"),
    attributes=("solid wood",), options=(("color", ("dark red", "red", "green2")), ("size", ("small", "x-small"))),
    prices=(19.99,), category="garden", query="desk lamps", product_category=PATH,
)  # fmt: skip
GOAL = Goal(
    asin="A1", category="garden", query="desk lamps", name="Oak Desk Lamp", product_category=PATH, instruction_text="",
    attributes=("solid wood",), price_upper=30.0, goal_options=(),
)  # fmt: skip
NOUNS = NounTable({"A1": ["oak", "desk", "lamp"], "A2": ["rug"], "A3": ["desk", "desk", "mat"], "A4": []})


def _reward(
    product: Product = PRODUCT,
    goal: Goal = GOAL,
    options: Mapping[str, str] | None = None,
    price: float = 19.99,
    match: OptionMatch = "upstream",
) -> RewardDetails:
    return compute_reward(Purchase(product, price, options or {}), goal, NOUNS, match)


def test_shares_of_attributes_options_and_price() -> None:
    assert _reward().score == 1.0
    assert _reward(price=30.01).score == 0.5
    goal = replace(GOAL, attributes=("solid wood", "waterproof"), goal_options=("small", "blue"))
    found = _reward(goal=goal, options={"size": "small"})
    assert found.score == pytest.approx(3 / 5)
    assert (found.r_att, found.r_option, found.r_price) == (0.5, 0.5, True)


@pytest.mark.parametrize(
    "wanted", ["wood solid", "solid woods", "oak desk", "easy assembly warm", "of solid oak", "Solid-Wood!"]
)
def test_attributes_are_found_alike_or_verbatim(wanted: str) -> None:
    """Alike to one in the list, or verbatim in the title, in the bullets joined by blanks, in the description."""
    assert _reward(goal=replace(GOAL, attributes=(wanted,))).r_att == 1.0


def test_an_absent_attribute_is_not_found() -> None:
    assert _reward(goal=replace(GOAL, attributes=("lamp oak",))).r_att == 0.0


def test_type_of_product() -> None:
    other = replace(PRODUCT, asin="A2", query="rugs", product_category="Home \u203a Rugs")
    assert _reward(other).r_type == 0.0, "no common noun"
    goal = replace(GOAL, asin="A3")
    half = replace(other, asin="A1")
    assert _reward(half, goal).title_score == pytest.approx(1 / 3), "a repeated noun counts each time it is wanted"
    assert _reward(half, goal).r_type == 1.0
    many = NounTable({"A1": ["oak", *map(str, range(7))], "A2": ["oak"], "A5": ["oak", *map(str, range(11))]})
    low = compute_reward(Purchase(replace(other, asin="A2"), 1.0, {}), GOAL, many)
    assert (low.title_score, low.r_type) == (0.125, 0.5)
    lower = compute_reward(Purchase(replace(PRODUCT, asin="A2"), 1.0, {}), replace(GOAL, asin="A5"), many)
    assert lower.query_match and (lower.r_type, lower.title_score) == (0.1, pytest.approx(1 / 12))
    none = _reward(other, replace(GOAL, asin="A4"))
    assert (none.title_score, none.r_type) == (0.2, 0.5), "no noun wanted"
    same_shelf = replace(other, product_category="Home \u203a Furniture \u203a Rugs")
    assert _reward(same_shelf, replace(GOAL, asin="A4")).r_type == 1.0


@pytest.mark.parametrize(
    ("wanted", "bought", "upstream", "fixed"),
    [
        (("red",), {"color": "red"}, True, True),
        (("red",), {"color": "dark red"}, False, False),  # becomes "dark"
        (("dark red",), {"color": "dark teal"}, True, False),  # both become "dark"
        (("small",), {"size": "x-small"}, True, False),
        (("small",), {"other name": "small"}, True, True),
        ({"color": "red"}, {"color": "red"}, True, True),
        ({"color": "dark red"}, {"color": "dark red"}, True, True),  # the pair's text against "dark"
        ({"color": "dark red"}, {"color": "dark teal"}, True, False),
        ({"color": "red"}, {"color": "light red"}, False, False),
        ({"color": "green2"}, {"color": "green2"}, False, True),  # the pair's text against "green"
        ({"size": "small"}, {"size": "small"}, True, True),
        ({"size": "small"}, {"fit": "small"}, True, False),
        ({"size": "small"}, {"kind": "size"}, True, False),  # a value equal to the name
    ],
)
def test_options(wanted: tuple[str, ...] | dict[str, str], bought: dict[str, str], upstream: bool, fixed: bool) -> None:
    goal = replace(GOAL, goal_options=wanted)
    assert _reward(goal=goal, options=bought).r_option == float(upstream)
    assert _reward(goal=goal, options=bought, match="fixed").r_option == float(fixed)


_VALUES = st.sampled_from(
    ["red", "dark red", "green2", "small", "x-small", "9", "9.5", "light blue", "\u9ed2", "\u767d"]
)
_NAMES = st.sampled_from(["color", "size", "fit"])
_OFFERED = st.dictionaries(_NAMES, st.lists(_VALUES, min_size=1, max_size=3, unique=True), max_size=3)
_WANTED = st.one_of(st.lists(_VALUES, max_size=3).map(tuple), st.dictionaries(_NAMES, _VALUES, max_size=3))


@settings(deadline=None, max_examples=300)
@given(offered=_OFFERED, wanted=_WANTED, match=st.sampled_from(["upstream", "fixed"]))
def test_winnable_is_what_trying_everything_says(
    offered: dict[str, list[str]], wanted: tuple[str, ...] | dict[str, str], match: OptionMatch
) -> None:
    product = replace(PRODUCT, options=tuple((name, tuple(values)) for name, values in offered.items()))
    goal = replace(GOAL, goal_options=wanted)
    choices = itertools.product(*([None, *values] for values in offered.values()))
    best = max(
        _reward(product, goal, {n: v for n, v in zip(offered, choice) if v is not None}, match=match).score
        for choice in choices
    )
    assert is_winnable(product, 19.99, goal, NOUNS, match) == (best == 1.0)
    assert not is_winnable(product, 31.0, goal, NOUNS, match)


@settings(deadline=None, max_examples=200)
@given(offered=_OFFERED, wanted=_WANTED, match=st.sampled_from(["upstream", "fixed"]), price=st.floats(1, 60))
def test_rewards_are_shares(
    offered: dict[str, list[str]], wanted: tuple[str, ...] | dict[str, str], match: OptionMatch, price: float
) -> None:
    bought = {name: values[0] for name, values in offered.items()}
    goal = replace(GOAL, goal_options=wanted)
    found = _reward(goal=goal, options=bought, price=price, match=match)
    assert 0.0 <= found.score <= 1.0
    assert (found.r_option is None) == (not wanted)
    cheaper = _reward(goal=goal, options=bought, price=price / 2, match=match)
    assert cheaper.score >= found.score
    assert _reward(goal=goal, match=match, price=price).score <= found.score, "options never cost anything"


def _slow_ratio(a: str, b: str) -> float:
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return 200 * rows[-1][-1] / (len(a) + len(b)) if a and b else 0.0


@settings(deadline=None, max_examples=200)
@given(a=st.lists(_VALUES, max_size=4).map(" ".join), b=st.lists(_VALUES, max_size=4).map(" ".join))
def test_ratio_against_the_slow_way(a: str, b: str) -> None:
    left = set("".join(c if c.isascii() and c.isalnum() else " " for c in a).split())
    right = set("".join(c if c.isascii() and c.isalnum() else " " for c in b).split())
    both = " ".join(sorted(left & right))
    one, other = (f"{both} {' '.join(sorted(rest))}".strip() for rest in (left - right, right - left))
    expected = round(max(_slow_ratio(*pair) for pair in ((both, one), (both, other), (one, other))))
    assert token_set_ratio(a, b) == token_set_ratio(b, a) == (expected if left and right else 0)


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [("", "x", 0), ("\u9ed2", "\u9ed2", 0), ("red", "Dark RED", 100), ("a-b", "b a", 100), ("woods", "wood", 89)],
)
def test_ratio_cases(a: str, b: str, ratio: int) -> None:
    assert token_set_ratio(a, b) == ratio


def _fails(model: str, title: str) -> tuple[str, ...]:
    raise OSError(f"{model} was made for another version")


@pytest.mark.parametrize(
    ("tagged", "words"), [(_fails, "made for another version"), (lambda model, title: (), "tags no nouns")]
)
def test_a_model_that_cannot_be_used_is_found_at_the_start(
    tagged: Callable[[str, str], tuple[str, ...]],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(nouns_module, "_tagged_nouns", tagged)
    default_nouns.cache_clear()
    try:
        assert isinstance(default_nouns(), ContentWords)
        assert words in caplog.text and "en_core_web_md" in caplog.text and "compares the words" in caplog.text
    finally:
        default_nouns.cache_clear()


def test_noun_extractors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    default_nouns.cache_clear()
    nouns = default_nouns()
    assert isinstance(nouns, (ContentWords, SpacyNouns))
    assert isinstance(nouns, SpacyNouns) or "compares the words of titles" in caplog.text
    words = ContentWords()
    assert words.nouns("A", "The 2 Oak-Lamps for men's desks, 10x") == ["oak-lamps", "men's", "desks"]
    table = tmp_path / "title_nouns.json"
    table.write_text('{"A1": ["lamp"]}', encoding="utf-8")
    assert NounTable.from_file(table).nouns("A1", "any") == ("lamp",)
    with pytest.raises(UserError, match="A9"):
        NounTable.from_file(table).nouns("A9", "any")
    for text in (
        '{"A1": [1]}',
        "[]",
        '{"A1": 3}',
        "{",
        '{"A1": "lamp"}',
        '{"A1": {"lamp": 1}}',
        '{"A1": null}',
        '"A1"',
    ):
        table.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="title_nouns"):
            NounTable.from_file(table)
