# SPDX-License-Identifier: Apache-2.0
"""Model text -> action, and pages taken apart: golden cases, every recorded page, malformed text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.environments.check import MALFORMED_TEXTS
from agent_system.environments.env_package.webshop import webshop_projection
from agent_system.environments.env_package.webshop.pages import (
    SEARCH_ACTION,
    click,
    clicked,
    episode_pages,
    extract_task,
    is_offered,
    offered_actions,
    page_text,
    parse_page,
    revealed_page,
)

TASK = "i need a red mug, and price lower than 20.00 dollars"
HEAD = ["Instruction:", TASK, "Back to Search"]
ITEM = [*HEAD, "< Prev", "color", "red", "sky blue", "size", "small", "Mug", "Price: $9.5", "Rating: N.A."]
ITEM += ["Description", "Features", "Reviews", "Buy Now"]
RESULTS = [*HEAD, "Page 2 (Total results: 11)", "< Prev", "Next >", "B0000000AA", "Red Mug", "$9.5 to $11.0"]
NAVIGATION = ["back to search", "< prev", "description", "features", "reviews", "buy now"]


def joined(parts: list[str]) -> str:
    return page_text(" [SEP] ".join(parts), TASK)


def test_recorded_projections(shared_dir: Path) -> None:
    golden = json.loads((shared_dir / "compat" / "golden" / "projections.json").read_text())
    actions, valids = webshop_projection(golden["cases"])
    assert {"actions": actions, "valids": valids} == golden["webshop"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><action>Search[Red Mug]</action>", ("search[red mug]", 1)),
        ("<think>a</think><action> click[< prev] </action>", ("click[< prev]", 1)),
        ("<think>a</think><action>buy it</action>", ("buy it", 1)),
        ("<action>click[red]</action>", ("click[red]", 0)),
        ("<think>a</think><action></action>", ("", 1)),
        ("x" * 100, ("x" * 20, 0)),
        ("<think>\u4e00</think><action>click[red]</action>", ("click[red]", 0)),
    ],
)
def test_projection(text: str, expected: tuple[str, int]) -> None:
    actions, valids = webshop_projection([text])
    assert (actions[0], valids[0]) == expected


def test_projection_takes_any_text_and_changes_no_input() -> None:
    texts = list(MALFORMED_TEXTS)
    actions, valids = webshop_projection(texts, [["click[search]"]] * len(texts))
    assert texts == list(MALFORMED_TEXTS)
    assert len(actions) == len(valids) == len(texts)


def test_request_and_page() -> None:
    first = f"WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search"
    assert extract_task(first) == TASK
    assert page_text(first, TASK) == "'Search'"
    assert joined(RESULTS).startswith("'Back to Search' [SEP] 'Page 2 (Total results: 11)' [SEP] '< Prev'")
    done = "Thank you for shopping with us! [SEP] Your code:"
    assert page_text(done, TASK) == done
    for wrong in ("", "WebShop", "WebShop [SEP] Order: [SEP] x [SEP] Search"):
        with pytest.raises(ValueError, match="Instruction:"):
            extract_task(wrong)


def test_offered_actions() -> None:
    offered = offered_actions({"has_search_bar": True, "clickables": ["search"]})
    assert offered == [SEARCH_ACTION, "click[search]"]
    assert is_offered("search[red mug]", offered) and is_offered(SEARCH_ACTION, offered)
    assert not is_offered("search[]", offered) and not is_offered("click[red]", offered)
    item = offered_actions({"has_search_bar": False, "clickables": NAVIGATION})
    assert not is_offered("search[red mug]", item) and is_offered("click[< prev]", item)
    assert clicked(click("< prev")) == "< prev" and clicked("search[a]") is None


def test_pages_are_taken_apart() -> None:
    page = parse_page(joined(ITEM), [click(name) for name in [*NAVIGATION, "red", "sky blue", "small"]])
    assert page.kind == "item"
    assert page.options == (("color", ("red", "sky blue")), ("size", ("small",)))
    assert page.text == ("Mug", "Price: $9.5", "Rating: N.A.")
    offered = [click(name) for name in ["back to search", "< prev", "next >", "b0000000aa"]]
    page = parse_page(joined(RESULTS), offered)
    assert page.kind == "results"
    assert page.products == (("b0000000aa", "Red Mug", "$9.5 to $11.0"),)
    assert page.text == ("Page 2 (Total results: 11)",)


def test_what_an_action_reveals() -> None:
    item, results = joined(ITEM), joined(RESULTS)
    assert revealed_page("click[b0000000aa]", item) == item
    assert revealed_page("search[mug]", results) == results
    for action in ("click[< prev]", "click[back to search]", "click[buy now]", "click[search]", "nonsense", ""):
        assert revealed_page(action, item) is None


def test_an_episode_in_short_repeats_no_page_and_tells_no_score() -> None:
    done = "Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] 1.0"
    offered = [click(name) for name in [*NAVIGATION, "red", "sky blue", "small"]]
    shown = episode_pages([joined(ITEM), joined(ITEM), done], [offered, offered])
    assert (
        shown[0] == "page 0: mug | price: $9.5 | rating: n.a. | color: click[red] click[sky blue] | size: click[small]"
    )
    assert shown[1:] == ["page 0 again", "page 2: bought"]


def _pages(walk: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(raw page, what it offers) of a recorded walk, in order; the done page comes without its actions."""
    raw = [walk["reset_obs"], *(step["obs"] for step in walk["steps"][:-1])]
    return list(zip(raw, [step["available"] for step in walk["steps"]]))


def test_every_recorded_page_is_understood_in_both_modes(shared_dir: Path) -> None:
    kinds: dict[str, set[str]] = {"text": set(), "text_rich": set()}
    for line in (shared_dir / "compat" / "golden" / "webshop_walks.jsonl").read_text().splitlines():
        walk = json.loads(line)
        task = walk["goal"]["instruction_text"]
        for raw, available in _pages(walk):
            text = page_text(raw, task)
            assert task not in text
            page = parse_page(text, offered_actions(available))
            kinds[walk["mode"]].add(page.kind)
            assert "[button" not in "".join(page.text) and "[clicked" not in "".join(page.text)
            named = {asin for asin, _, _ in page.products} | {v for _, values in page.options for v in values}
            buttons = [*NAVIGATION, "search", "next >", "attributes"]
            assert named == {name for name in available["clickables"] if name not in buttons}
    assert kinds["text"] == kinds["text_rich"] >= {"index", "results", "item", "sub"}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["'", " [SEP] ", "Buy Now", "\n", TASK]), max_size=8))
def test_no_page_text_makes_the_parser_raise(pieces: list[str]) -> None:
    raw = "".join(pieces)
    text = page_text(raw, TASK)
    for offered in ([], ["click[buy now]", "click[red]"], ["click[< prev]"]):
        assert parse_page(text, offered).kind in ("index", "results", "item", "sub", "done")
    assert len(episode_pages([text, text], [[]])) == 2
