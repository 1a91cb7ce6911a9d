# SPDX-License-Identifier: Apache-2.0
"""The explorer wins from texts alone, makes the detours and mistakes asked for, and recovers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from agent_system.environments.env_package.alfworld import AlfworldGame
from agent_system.environments.env_package.alfworld.belief import Task, parse_task
from agent_system.environments.env_package.alfworld.experts import ExpertAction, Explorer
from agent_system.environments.env_package.alfworld.package_data import load_tables
from verl.utils.errors import UserError


def _play(file: Path, seed: int, detour_rate: float = 0.0, error_rate: float = 0.0) -> tuple[bool, list[ExpertAction]]:
    game = AlfworldGame(file)
    expert = Explorer(game, np.random.default_rng(seed), detour_rate, error_rate)
    observation, info = game.reset()
    actions = []
    for _ in range(50):
        choice = expert.act(observation, info)
        assert (choice.action in info["admissible_commands"]) == (choice.kind != "mistake"), choice
        assert 2 <= len(choice.thought.split()) <= 4
        observation, _, done, info = game.step(choice.action)
        if choice.kind == "mistake":
            assert observation == "Nothing happens."
        actions.append(choice)
        if done:
            return True, actions
    return False, actions


def test_explorer_wins_small_games(small_gamefiles: list[Path]) -> None:
    results = [_play(file, seed) for seed, file in enumerate(small_gamefiles)]
    assert np.mean([won for won, _ in results]) > 0.99
    assert 7 < np.mean([len(actions) for _, actions in results]) < 14
    assert all(choice.kind == "plan" for _, actions in results for choice in actions)


@pytest.mark.parametrize(("detour_rate", "error_rate"), [(0.3, 0.0), (0.3, 0.1)])
def test_explorer_recovers(small_gamefiles: list[Path], detour_rate: float, error_rate: float) -> None:
    results = [_play(file, seed, detour_rate, error_rate) for seed, file in enumerate(small_gamefiles)]
    assert np.mean([won for won, _ in results]) > 0.95
    kinds = Counter(choice.kind for _, actions in results for choice in actions)
    assert kinds["detour"] / kinds.total() == pytest.approx(detour_rate, abs=0.06)
    assert kinds["mistake"] / kinds.total() == pytest.approx(error_rate, abs=0.04)


def test_explorer_wins_whole_rooms(gamefiles: list[Path], shared_dir: Path) -> None:
    assert np.mean([_play(file, seed)[0] for seed, file in enumerate(gamefiles)]) > 0.95
    real = next((shared_dir / "data/alfworld/json_2.1.1/train").glob("pick_heat*Potato*-14/*/game.tw-pddl"))
    assert all(_play(real, seed, 0.3, 0.05)[0] for seed in range(10))


def test_explorer_is_seeded(small_gamefiles: list[Path]) -> None:
    for file in small_gamefiles[:6]:
        assert _play(file, 1, 0.3, 0.1) == _play(file, 1, 0.3, 0.1)
    assert any(_play(file, 1) != _play(file, 2) for file in small_gamefiles[:6])


def test_explorer_knows_only_what_it_saw(small_gamefiles: list[Path]) -> None:
    """Objects are taken only after a text named them in that receptacle."""
    for seed, file in enumerate(small_gamefiles[:40]):
        game = AlfworldGame(file)
        expert = Explorer(game, np.random.default_rng(seed), detour_rate=0.2)
        observation, info = game.reset()
        seen = observation
        for _ in range(50):
            choice = expert.act(observation, info)
            if choice.action.startswith("take "):
                assert choice.action[5:].split(" from ")[0] in seen
            observation, _, done, info = game.step(choice.action)
            seen += observation
            if done:
                break


def test_task_sentences() -> None:
    expected = {
        "pick_and_place_simple": Task("mug", "shelf", "", "", 1),
        "look_at_obj_in_light": Task("mug", "", "desklamp", "", 1),
        "pick_clean_then_place_in_recep": Task("mug", "shelf", "", "clean", 1),
        "pick_heat_then_place_in_recep": Task("mug", "shelf", "", "hot", 1),
        "pick_cool_then_place_in_recep": Task("mug", "shelf", "", "cool", 1),
        "pick_two_obj_and_place": Task("mug", "shelf", "", "", 2),
    }
    for task_type, (_, sentences) in load_tables().goals.items():
        for sentence in sentences:
            text = sentence.format(obj="mug", recep="shelf", toggle="desklamp")
            assert parse_task(f"Your task is to: {text}.") == expected[task_type]
    with pytest.raises(UserError, match="do not understand"):
        parse_task("Your task is to: tidy up.")
