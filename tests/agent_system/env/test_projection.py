# SPDX-License-Identifier: Apache-2.0
"""Model text -> command: recorded cases, malformed text of every kind."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.environments.check import MALFORMED_TEXTS
from agent_system.environments.env_package.alfworld.projection import alfworld_projection

GOLDEN = Path(__file__).parents[4] / "shared" / "compat" / "golden" / "projections.json"


def test_recorded_cases() -> None:
    if not GOLDEN.is_file():
        pytest.skip(f"{GOLDEN} is not here")
    golden = json.loads(GOLDEN.read_text())
    actions, valids = alfworld_projection(golden["cases"])
    assert {"actions": actions, "valids": valids} == golden["alfworld"]


def test_input_is_not_changed_and_pools_are_accepted() -> None:
    texts = list(MALFORMED_TEXTS)
    actions, valids = alfworld_projection(texts, [["look"]] * len(texts))
    assert texts == list(MALFORMED_TEXTS)
    assert len(actions) == len(valids) == len(texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><ACTION>Go To Shelf 1</ACTION>", ("go to shelf 1", 1)),
        ("<think>a</think><action>fly</action>", ("fly", 1)),
        ("<think>a<action>look</action>", ("look", 0)),
        ("<think>a</think><action>look", ("<think>a</think><action>look", 0)),
        ("<think>\u9fff</think><action>look</action>", ("look", 0)),
        ("<think>\ua000</think><action>look</action>", ("look", 1)),
        ("<think>a</think><action>\x00look\x1b</action>", ("\x00look\x1b", 1)),
        ("<think>a</think><action>" + "y" * 10_000 + "</action>", ("y" * 10_000, 1)),
        ("x" * 10_000, ("x" * 30, 0)),
    ],
)
def test_cases(text: str, expected: tuple[str, int]) -> None:
    actions, valids = alfworld_projection([text])
    assert (actions[0], valids[0]) == expected


_PIECES = st.sampled_from(
    ["<action>", "</action>", "<ACTION>", "<think>", "</think>", "look", "\u6211", "\u0130", " ", "\n"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_PIECES | st.text(max_size=5), max_size=12).map("".join))
def test_any_text_gives_a_pair(text: str) -> None:
    actions, valids = alfworld_projection([text])
    assert isinstance(actions[0], str) and valids[0] in (0, 1)
    if valids[0]:
        assert "<think>" in text and "</action>" in text.lower()
