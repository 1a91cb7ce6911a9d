# SPDX-License-Identifier: Apache-2.0
"""The rules of the shop: pages, what they offer, the end, snapshots, keys."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.game import WebShopText, parse_action
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.observation import Part, render
from agent_system.environments.env_package.webshop.session import WebShopSession


@pytest.fixture
def session(catalogue: Catalogue, goals: GoalSet) -> WebShopSession:
    session = WebShopSession(catalogue, goals)
    session.reset(0)
    return session


def _with_options(catalogue: Catalogue) -> tuple[str, str, str, str]:
    """Asin, title and two values of one option of some product."""
    for number in range(len(catalogue)):
        product = catalogue.product(number)
        if product.options and len(product.options[0][1]) > 1:
            return product.asin, product.title, *product.options[0][1][:2]
    raise AssertionError("no product has options")


def _open(session: WebShopSession, asin: str, title: str) -> None:
    session.step(f"search[{title}]")
    while f"click[{asin.lower()}]" not in [
        f"click[{c}]" for c in session.rules.available_actions(session.state)["clickables"]
    ]:
        before = session.state.page_number
        session.step("click[next >]")
        assert session.state.page_number == before + 1 <= 6
    session.step(f"click[{asin.lower()}]")
    assert session.state.page == "item"


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("search[Red Lamp]", ("search", "red lamp")),
        ("click[a[b]]", ("click[a", "b]")),
        ("click[x] and more", ("click", "x")),
        ("think: search[x]", ("think: search", "x")),
        ("search[]", None),
        ("[x]", None),
        ("", None),
        ("search\n[x]", None),
        ("search[ x ]", ("search", " x ")),
    ],
)
def test_actions_are_taken_apart(action: str, expected: tuple[str, str] | None) -> None:
    assert parse_action(action) == expected


def test_what_pages_offer(session: WebShopSession, catalogue: Catalogue) -> None:
    observation, info = session.reset(3)
    assert observation == f"WebShop [SEP] Instruction: [SEP] {session.instruction} [SEP] Search"
    assert info["available_actions"] == {"has_search_bar": True, "clickables": ["search"]}
    assert (info["won"], info["task_score"], info["goal_index"], info["asin"]) == (False, 0.0, 3, session.goal.asin)
    query = "classic lamp for reading"
    observation, reward, done, info = session.step(f"search[{query}]")
    assert (reward, done) == (0.0, False) and "Page 1 (Total results: 50)" in observation
    asins = [catalogue.listing(int(n)).asin.lower() for n in catalogue.search(query)[:10]]
    assert info["available_actions"] == {"has_search_bar": False, "clickables": ["back to search", "next >", *asins]}
    *_, info = session.step("click[next >]")
    assert info["available_actions"]["clickables"][:3] == ["back to search", "< prev", "next >"]
    for _ in range(5):
        observation, *_, info = session.step("click[next >]")
    assert "Page 7 (Total results: 50)" in observation, "the next page is offered past the end, where it is empty"
    assert info["available_actions"]["clickables"] == ["back to search", "< prev", "next >"]
    observation, *_ = session.step("search[qqq zzz]")
    assert "Page 1 (Total results: 0)" in observation
    *_, info = session.step("click[back to search]")
    assert info["available_actions"]["has_search_bar"]


@pytest.mark.parametrize(
    "action",
    ["click[search]", "click[buy now]", "click[Next]", "buy", "", "Search[lamp]", "click[b000000000]", "search"],
)
def test_other_text_changes_nothing(session: WebShopSession, action: str) -> None:
    for _ in range(2):
        before = session.state, session.observation
        observation, reward, done, _ = session.step(action)
        assert (session.state, observation, reward, done) == (*before, 0.0, False)
        session.step("search[table lamp]")


def test_item_pages(session: WebShopSession, catalogue: Catalogue) -> None:
    asin, title, first, second = _with_options(catalogue)
    _open(session, asin, title)
    product = catalogue.product(session.state.product)
    plain = session.observation
    observation, *_ = session.step(f"click[{first.upper()}]")
    assert observation == plain, "text mode does not show what is selected"
    session.step(f"click[{second}]")
    assert session.state.options == ((product.options[0][0], second),), "another value replaces the first"
    features, *_, info = session.step("click[features]")
    assert features.endswith(" [SEP] ".join(bullet.strip() for bullet in product.bullets))
    assert info["available_actions"]["clickables"] == ["back to search", "< prev"]
    session.step("click[< prev]")
    assert session.state.options and session.observation == plain, "a sub-page keeps the selection"
    reviews, *_ = session.step("click[reviews]")
    assert reviews.endswith("Back to Search [SEP] < Prev")
    session.step("click[< prev]")
    page = session.state.page_number
    session.step("click[< prev]")
    assert (session.state.page, session.state.options, session.state.page_number) == ("results", (), page)


def test_attributes_page_is_optional(catalogue: Catalogue, goals: GoalSet) -> None:
    session = WebShopSession(catalogue, goals, show_attributes=True)
    session.reset(0)
    _open(session, catalogue.product(7).asin, catalogue.product(7).title)
    observation, *_ = session.step("click[attributes]")
    product = catalogue.product(7)
    assert observation.endswith(
        " [SEP] ".join([*product.attributes, product.category, product.query, product.product_category])
    )


def test_rich_pages_mark_what_was_clicked(catalogue: Catalogue, goals: GoalSet) -> None:
    asin, title, first, second = _with_options(catalogue)
    session = WebShopSession(catalogue, goals, "text_rich")
    session.reset(0)
    _open(session, asin, title)
    session.step(f"click[{first}]")
    assert session.observation.startswith(f"You have clicked {first}.\nInstruction:\n")
    assert f"  [clicked button] {first} [clicked button_]\n  [button] {second} [button_]" in session.observation
    session.step("click[< prev]")
    assert f"\n[clicked button] {asin} [clicked button_]\n" in session.observation
    session.step("click[back to search]")
    session.step(f"search[{title}]")
    assert "clicked" not in session.observation, "the index page forgets what was opened"


def test_empty_and_blank_parts() -> None:
    parts = [Part("text", text) for text in ("a", "", "  ", " \n ", " b ")]
    assert render(parts, "text") == "a [SEP]  [SEP] b"
    assert render(parts, "text_rich") == "a\n \n b \n"
    value = [Part("option", "caf\u00e9"), Part("option", '5" wide'), Part("option", "red")]
    rich = render(value, "text_rich", "q/1/" + json.dumps({"a": "caf\u00e9", "b": '5" wide', "c": "red"}))
    assert rich.count("[clicked button]") == 1, "only values that stand as they are in the address show as selected"


def test_a_purchase_ends_the_episode(session: WebShopSession, goals: GoalSet, catalogue: Catalogue) -> None:
    product = catalogue.product(goals.product_of(0))
    _open(session, product.asin, product.title)
    for value in session.goal.goal_options:
        session.step(f"click[{value}]")
    chosen = json.dumps(dict(session.state.options), sort_keys=True)
    observation, reward, done, info = session.step("click[buy now]")
    assert (reward, done, info["won"], info["task_score"]) == (1.0, True, True, 1.0)
    assert info["available_actions"] == {"has_search_bar": False, "clickables": []}
    assert f"Purchased [SEP] asin [SEP] {product.asin} [SEP] options [SEP] {chosen} [SEP]" in observation
    for action in ("search[lamp]", "click[back to search]", "click[buy now]", "anything"):
        again, reward, done, info = session.step(action)
        assert (again, reward, done, info["won"], info["task_score"]) == (observation, 0.0, True, True, 1.0)
    _, info = session.reset(1)
    assert not info["won"] and info["task_score"] == 0.0


def test_quotes_on_the_last_page_are_escaped_like_scripts(catalogue: Catalogue, goals: GoalSet) -> None:
    rules = WebShopText(catalogue, goals)
    state = rules.initial(0)._replace(page="done", product=0, options=(("size", "men's & <8>"),), score=0.5)
    assert '{"size": "men\\u0027s \\u0026 \\u003c8\\u003e"}' in rules.observe(state)


def _walk(session: WebShopSession, rng: np.random.Generator, steps: int) -> list[tuple[str, str, bool]]:
    trace = []
    for _ in range(steps):
        clickables = session.rules.available_actions(session.state)["clickables"]
        options = [
            "search[lamp for reading]",
            "nonsense",
            *(f"click[{name}]" for name in clickables if name != "buy now"),
        ]
        observation, _, done, _ = session.step(options[int(rng.integers(len(options)))])
        trace.append((observation, session.state_key, done))
    return trace


def test_steps_are_pure_and_snapshots_exact(catalogue: Catalogue, goals: GoalSet) -> None:
    for mode in ("text", "text_rich"):
        session = WebShopSession(catalogue, goals, mode)
        session.reset(5)
        _walk(session, np.random.default_rng(1), 6)
        snapshot = pickle.loads(pickle.dumps(session.snapshot()))
        key, observation = session.state_key, session.observation
        trace = _walk(session, np.random.default_rng(2), 20)
        other = WebShopSession(catalogue, goals, mode)
        assert other.restore(snapshot)["goal_index"] == 5
        assert (other.state_key, other.observation) == (key, observation)
        assert _walk(other, np.random.default_rng(2), 20) == trace
        state = snapshot.state
        assert session.rules.step(state, "search[rug]") == session.rules.step(state, "search[rug]")


def test_snapshots_of_other_goals_are_refused(catalogue: Catalogue, goals: GoalSet, session: WebShopSession) -> None:
    other = WebShopSession(catalogue, GoalSet.load(catalogue, seed=1))
    with pytest.raises(ValueError, match="another shop"):
        other.restore(session.snapshot())
    with pytest.raises(RuntimeError, match="reset"):
        other.step("search[x]")
    with pytest.raises(IndexError):
        other.reset(len(goals))


def test_keys_tell_states_apart(session: WebShopSession, catalogue: Catalogue) -> None:
    asin, title, first, second = _with_options(catalogue)
    keys = [session.state_key]
    _open(session, asin, title)
    keys.append(session.state_key)
    for value in (first, second):
        session.step(f"click[{value}]")
        keys.append(session.state_key)
    session.step("click[features]")
    keys.append(session.state_key)
    assert len(set(keys)) == len(keys)
    session.step("click[< prev]")
    session.step(f"click[{first}]")
    assert session.state_key == keys[2]
    session.reset(1)
    assert session.state_key not in keys


def test_the_key_ignores_the_order_of_choices(catalogue: Catalogue, goals: GoalSet) -> None:
    session = WebShopSession(catalogue, goals)
    number = next(n for n in range(len(catalogue)) if len(catalogue.product(n).options) > 1)
    product = catalogue.product(number)
    (_, (a, *_)), (_, (b, *_)) = product.options[:2]
    keys = set()
    for order in ((a, b), (b, a)):
        session.reset(0)
        _open(session, product.asin, product.title)
        for value in order:
            session.step(f"click[{value}]")
        keys.add(session.state_key)
    assert len(keys) == 1


_PLAY = """
import sys
from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.session import WebShopSession
catalogue = Catalogue.load(sys.argv[1], cache_dir=sys.argv[2])
session = WebShopSession(catalogue, GoalSet.load(catalogue))
session.reset(11)
for action in sys.argv[3:]:
    session.step(action)
print(session.state_key)
"""


def test_keys_are_equal_across_processes(
    generated_dir: Path, shop_cache: Path, catalogue: Catalogue, goals: GoalSet
) -> None:
    asin, title, first, _ = _with_options(catalogue)
    session = WebShopSession(catalogue, goals)
    session.reset(11)
    _open(session, asin, title)
    clicks = ["click[next >]"] * (session.state.page_number - 1)
    session.step(f"click[{first}]")
    actions = [f"search[{title}]", *clicks, f"click[{asin.lower()}]", f"click[{first}]"]
    command = [sys.executable, "-c", _PLAY, str(generated_dir), str(shop_cache), *actions]
    keys = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {session.state_key}


def test_sessions_do_not_touch_each_other(catalogue: Catalogue, goals: GoalSet) -> None:
    one, two = WebShopSession(catalogue, goals), WebShopSession(catalogue, goals)
    one.reset(0)
    two.reset(0)
    alone = _walk(one, np.random.default_rng(0), 15)
    one.reset(0)
    rng, other = np.random.default_rng(0), np.random.default_rng(9)
    mixed = []
    for _ in range(15):
        mixed += _walk(one, rng, 1)
        _walk(two, other, 1)
    assert mixed == alone
