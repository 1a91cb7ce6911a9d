# SPDX-License-Identifier: Apache-2.0
"""Prompts of both styles: what is always in them, history, memory aids."""

from pathlib import Path
from random import Random
from typing import Literal

import pytest

from agent_system.environments import prompts
from agent_system.environments.env_package.webshop.envs import WebshopGame
from agent_system.environments.env_package.webshop.pages import click, page_text
from agent_system.environments.env_package.webshop.prompt_builder import WebshopPromptBuilder
from agent_system.environments.env_package.webshop.tasks import ShopSettings, open_shop
from tests.agent_system.webshop_manager.test_pages import HEAD, ITEM, NAVIGATION, RESULTS, TASK, joined
from verl.utils.errors import UserError

INDEX = page_text(f"WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search", TASK)
ITEM_PAGE, RESULTS_PAGE = joined(ITEM), joined(RESULTS)
SUB_PAGE = joined([*HEAD, "< Prev", "Holds 300 ml"])
ITEM_ACTIONS = [click(name) for name in [*NAVIGATION, "red", "sky blue", "small"]]
RESULTS_ACTIONS = [click(name) for name in ["back to search", "< prev", "next >", "b0000000aa"]]
HISTORY = [(INDEX, "search[mug]"), (RESULTS_PAGE, "click[b0000000aa]"), (ITEM_PAGE, "click[red]")]


def test_template_fields() -> None:
    fields = {"task_description", "current_observation", "available_actions"}
    later = fields | {"step_count", "history_length", "action_history", "current_step"}
    for template, wanted in ((prompts.WEBSHOP_TEMPLATE_NO_HIS, fields), (prompts.WEBSHOP_TEMPLATE, later)):
        text = template.format(**{name: f"<<{name}>>" for name in wanted})
        assert all(f"<<{name}>>" in text for name in wanted)
        assert all(tag in text for tag in ("<think>", "</think>", "<action>", "</action>"))


@pytest.mark.parametrize("style", ["full", "compact"])
@pytest.mark.parametrize("shown", [None, 0, 1, 9])
def test_request_page_and_actions_are_always_there(style: str, shown: int | None) -> None:
    builder = WebshopPromptBuilder(style, 2)  # type: ignore[arg-type]
    text = builder.build(TASK, HISTORY, ITEM_PAGE, ITEM_ACTIONS, shown)
    assert TASK in text and "price: $9.5" in text.lower()
    for action in ITEM_ACTIONS:
        assert action in text


def test_full_history() -> None:
    text = WebshopPromptBuilder("full", 2).build(TASK, HISTORY, ITEM_PAGE, ITEM_ACTIONS)
    assert "taken 3 step(s)" in text and "last 2 page(s)" in text and "step 4" in text
    assert f"[Observation 2: '{RESULTS_PAGE}', Action 2: 'click[b0000000aa]']\n[Observation 3: '{ITEM_PAGE}'" in text
    assert "Action 1" not in text
    assert "'click[red],\n" not in text and "'click[red]',\n" in text
    none = WebshopPromptBuilder("full", 0).build(TASK, HISTORY, ITEM_PAGE, ITEM_ACTIONS)
    assert "step(s)" not in none and "Observation" not in none


def test_compact_lists_each_action_once_and_marks_what_was_opened() -> None:
    builder = WebshopPromptBuilder("compact", 2)
    first = builder.build(TASK, HISTORY[:1], RESULTS_PAGE, RESULTS_ACTIONS).split("\n")
    assert "red mug $9.5 to $11.0 click[b0000000aa]" in first
    assert sum("b0000000aa" in line for line in first) == 1
    again = builder.build(TASK, [*HISTORY, (ITEM_PAGE, "click[< prev]")], RESULTS_PAGE, RESULTS_ACTIONS)
    assert "red mug $9.5 to $11.0 click[b0000000aa] (opened)" in again.split("\n")


def test_compact_remembers_selected_options_of_this_item_only() -> None:
    builder = WebshopPromptBuilder("compact", 1)
    assert "Chosen" not in builder.build(TASK, HISTORY[:2], ITEM_PAGE, ITEM_ACTIONS)
    assert "Chosen: red" in builder.build(TASK, HISTORY, ITEM_PAGE, ITEM_ACTIONS)
    last_of_its_line = [*HISTORY[:-1], (ITEM_PAGE, "click[small]")]
    assert "(opened)" not in builder.build(TASK, last_of_its_line, ITEM_PAGE, ITEM_ACTIONS)
    longer = [*HISTORY, (ITEM_PAGE, "click[features]"), (SUB_PAGE, "click[< prev]"), (ITEM_PAGE, "click[sky blue]")]
    assert "Chosen: sky blue\n" in builder.build(TASK, longer, ITEM_PAGE, ITEM_ACTIONS)
    left = [*HISTORY, (ITEM_PAGE, "click[< prev]"), (RESULTS_PAGE, "click[b0000000aa]")]
    assert "Chosen" not in builder.build(TASK, left, ITEM_PAGE, ITEM_ACTIONS)


@pytest.mark.parametrize(
    "action", ["click[add to cart]", "click[green]", "click[b0000000zz]", "buy it", "click[search]"]
)
def test_compact_remembers_options_across_actions_that_the_page_did_not_offer(action: str) -> None:
    builder = WebshopPromptBuilder("compact", 1)
    history = [*HISTORY, (ITEM_PAGE, action), (ITEM_PAGE, "click[small]"), (ITEM_PAGE, action)]
    assert "Chosen: red, small\n" in builder.build(TASK, history, ITEM_PAGE, ITEM_ACTIONS)
    on_sub_page = [*HISTORY, (ITEM_PAGE, "click[features]"), (SUB_PAGE, action), (SUB_PAGE, "click[small]")]
    text = builder.build(TASK, [*on_sub_page, (SUB_PAGE, "click[< prev]")], ITEM_PAGE, ITEM_ACTIONS)
    assert "Chosen: red\n" in text, "a sub-page offers no options"


@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_compact_says_what_the_state_holds(shop_dir: Path, mode: Literal["text", "text_rich"]) -> None:
    """Random play, with actions that no page offers."""
    shop = open_shop(ShopSettings(str(shop_dir)))
    builder, random, seen = WebshopPromptBuilder("compact", 3), Random(0), 0
    for goal in range(0, 160, 4):
        game = WebshopGame(shop, goal, mode)
        page, info = game.reset()
        history: list[tuple[str, str]] = []
        for _ in range(25):
            others = [click("add to cart"), "search[lamp]" if random.random() < 0.2 else "look", click("red")]
            offered = [action for action in info["admissible_commands"] if "buy now" not in action]
            state = game.session.state
            options = shop.catalogue.product(state.product).options if state.product >= 0 else ()
            values = [value for _, found in options for value in found]
            action = random.choice([*others, *offered, *map(click, values)]).replace("<your query>", "blue")
            history.append((page, action))
            page, _, _, info = game.step(action)
            state = game.session.state
            if state.page == "item":
                chosen = dict(state.options)
                names = [name for name, _ in shop.catalogue.product(state.product).options if name in chosen]
                expected = [f"Chosen: {', '.join(chosen[name] for name in names)}"] if names else []
                prompt = builder.build(game.session.instruction, history, page, info["admissible_commands"])
                assert [line for line in prompt.split("\n") if line.startswith("Chosen:")] == expected
                seen += bool(names)
    assert seen > 50


def test_compact_keeps_what_a_sub_page_said_and_says_when_nothing_happened() -> None:
    builder = WebshopPromptBuilder("compact", 2)
    history = [*HISTORY, (ITEM_PAGE, "click[features]"), (SUB_PAGE, "click[< prev]")]
    assert ">click[features]\nholds 300 ml\n>click[< prev]\n" in builder.build(TASK, history, ITEM_PAGE, ITEM_ACTIONS)
    wrong = [*HISTORY, (ITEM_PAGE, "click[green]")]
    text = builder.build(TASK, wrong, ITEM_PAGE, ITEM_ACTIONS)
    assert ">click[red]\n>click[green]\n(nothing changed)\n" in text


def test_styles_are_checked() -> None:
    with pytest.raises(UserError, match=r"env\.webshop\.prompt_style=short"):
        WebshopPromptBuilder("short", 2)  # type: ignore[arg-type]
