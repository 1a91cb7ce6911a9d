# SPDX-License-Identifier: Apache-2.0
"""Memory text against recorded values, and the store contract."""

import json
from pathlib import Path

import pytest

from agent_system.memory import SearchMemory, SimpleMemory
from agent_system.memory.memory import format_action_history

GOLDEN = Path(__file__).parents[3] / "shared" / "compat" / "golden" / "memory.json"


def golden() -> dict:
    if not GOLDEN.is_file():
        pytest.skip(f"{GOLDEN} is not here")
    return json.loads(GOLDEN.read_text())


def filled() -> SimpleMemory:
    memory = SimpleMemory()
    memory.reset(2)
    for turn in range(3):
        memory.store({"text_obs": [f"o{turn}a", f"o{turn}b"], "action": [f"act{turn}a", f"act{turn}b"]})
    return memory


@pytest.mark.parametrize("length", [0, 2, 5])
def test_simple_memory_equals_recorded_text(length: int) -> None:
    texts, counts = filled().fetch(length)
    assert [texts, counts] == golden()[f"simple_h{length}"]


def test_search_memory_equals_recorded_text() -> None:
    memory = SearchMemory()
    memory.reset(1)
    memory.store({"search": ["<search>q</search>"], "information": ["doc"]})
    memory.store({"search": ["<search>r</search>"], "information": ["doc2"]})
    texts, counts = memory.fetch(4, obs_key="information", action_key="search")
    assert [texts, counts] == golden()["search_h4"]


def test_storing_a_subset_leaves_other_slots() -> None:
    memory = filled()
    memory.store({"text_obs": ["later"], "action": ["go"]}, slots=[1])
    assert [len(memory[0]), len(memory[1])] == [3, 4]
    assert memory.fetch(1)[0] == [
        "[Observation 3: 'o2a', Action 3: 'act2a']",
        "[Observation 4: 'later', Action 4: 'go']",
    ]
    assert len(memory) == 2


def test_other_keys_or_wrong_length_are_refused() -> None:
    memory = filled()
    with pytest.raises(AssertionError, match="memory keys"):
        memory.store({"text_obs": ["x", "y"]})
    with pytest.raises(AssertionError, match="1 values for 2 slots"):
        memory.store({"text_obs": ["x"], "action": ["a", "b"]})
    memory.reset(1)
    memory.store({"other": ["x"]})


def test_format_action_history_equals_memory_text() -> None:
    history = [(f"o{i}a", f"act{i}a") for i in range(3)]
    assert format_action_history(history, 2) == filled().fetch(2)[0][0]
    assert format_action_history(history, 0) == ""
