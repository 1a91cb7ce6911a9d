# SPDX-License-Identifier: Apache-2.0
"""ALFWorld prompts: fields, history, what is always there."""

import pytest

from agent_system.environments.env_package.alfworld.prompt_builder import (
    AlfworldPromptBuilder,
    extract_task,
    unvisited_first,
)
from verl.utils.errors import UserError

ROOM = "You are in the middle of a room. Looking quickly around you, you see a drawer 1, and a shelf 1."
FIRST = f"-= Welcome to TextWorld, ALFRED! =-\n\n{ROOM}\n\nYour task is to: put a mug in shelf."
TASK = "put a mug in shelf."
COMMANDS = ["examine drawer 1", "go to drawer 1", "go to shelf 1", "help", "inventory", "look", "open drawer 1"]
HISTORY = [(FIRST, "go to drawer 1"), ("You arrive at drawer 1.", "fly"), ("Nothing happens.", "open drawer 1")]
NOW = "You open the drawer 1. {x} In it, you see nothing."


def test_extract_task() -> None:
    assert extract_task(FIRST) == TASK
    with pytest.raises(ValueError, match="Your task is to"):
        extract_task(ROOM)


def test_full_first_turn() -> None:
    text = AlfworldPromptBuilder("full", 2).build(TASK, [], FIRST, COMMANDS)
    assert FIRST in text and "help" not in text
    assert "['examine drawer 1'\n 'go to drawer 1'\n 'go to shelf 1'\n 'inventory'\n 'look'\n 'open drawer 1']" in text
    assert "<think> </think>" in text and "<action> </action>" in text


def test_full_with_history() -> None:
    text = AlfworldPromptBuilder("full", 2).build("Your task is to: " + TASK, HISTORY, NOW, COMMANDS)
    assert "Your task is to: put a mug in shelf.\n" in text and NOW in text
    assert (
        "[Observation 2: 'You arrive at drawer 1.', Action 2: 'fly']\n"
        "[Observation 3: 'Nothing happens.', Action 3: 'open drawer 1']"
    ) in text
    assert "taken 3 step(s)" in text and "This is step 4" in text and "The last 2 observation(s)" in text
    assert "Observation 1" not in text


@pytest.mark.parametrize("style", ["full", "compact"])
@pytest.mark.parametrize("length", [-1, 0, 1, 5])
def test_task_observation_and_commands_are_always_there(style: str, length: int) -> None:
    builder = AlfworldPromptBuilder(style, length)  # type: ignore[arg-type]
    for limit in (None, 0, 1, 9):
        text = builder.build(TASK, HISTORY, NOW, COMMANDS, limit)
        assert TASK in text and NOW in text
        assert all(command in text for command in COMMANDS if command != "help")
        shown = min(max(length, 0), 3) if limit is None else min(max(length, 0), 3, limit)
        assert text.count("Action " if style == "full" else ">") == shown


def test_compact_text() -> None:
    builder = AlfworldPromptBuilder("compact", 2)
    assert builder.build(TASK, [], FIRST, COMMANDS).split("\n") == [
        "Task: put a mug in shelf.",
        "You are in the middle of a room.",
        "Commands:",
        "go to drawer 1",
        "go to shelf 1",
        "examine drawer 1",
        "inventory",
        "look",
        "open drawer 1",
    ]
    assert builder.build(TASK, HISTORY, NOW, COMMANDS).split("\n")[:7] == [
        "Task: put a mug in shelf.",
        ">fly",
        "Nothing happens.",
        ">open drawer 1",
        NOW,
        "Commands:",
        "go to shelf 1",
    ]


def test_a_failed_visit_is_no_visit() -> None:
    commands = ["go to drawer 1", "go to shelf 1", "look"]
    history = [(FIRST, "go to shelf 1"), ("Nothing happens.", "go to drawer 1")]
    assert unvisited_first(commands, history, "You arrive at drawer 1.") == ["go to shelf 1", "go to drawer 1", "look"]


def test_unknown_style() -> None:
    with pytest.raises(UserError, match="full or compact"):
        AlfworldPromptBuilder("short", 2)  # type: ignore[arg-type]
