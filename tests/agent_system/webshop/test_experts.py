# SPDX-License-Identifier: Apache-2.0
"""The explorer wins from pages alone, makes the detours and mistakes asked for, and recovers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.experts import ExpertAction, WebShopExplorer
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.observation import ObservationMode
from agent_system.environments.env_package.webshop.pages import is_offered, offered_actions
from agent_system.environments.env_package.webshop.request import best_value, parse_request, price_bounds
from agent_system.environments.env_package.webshop.session import WebShopSession


def _play(
    goals: GoalSet, goal: int, detour_rate: float = 0.0, error_rate: float = 0.0, mode: ObservationMode = "text"
) -> tuple[bool, list[ExpertAction]]:
    session = WebShopSession(goals.catalogue, goals, mode)
    expert = WebShopExplorer(session, np.random.default_rng(goal), detour_rate, error_rate)
    observation, info = session.reset(goal)
    actions = []
    for _ in range(15):
        choice = expert.act(observation, info)
        offered = offered_actions(info["available_actions"])
        assert is_offered(choice.action, offered) == (choice.kind != "mistake"), choice
        assert 2 <= len(choice.thought.split()) <= 4
        before = observation
        observation, _, done, info = session.step(choice.action)
        if choice.kind == "mistake":
            assert observation == before and not done
        actions.append(choice)
        if done:
            assert choice.kind == "plan", "only the plan buys"
            break
    return info["won"], actions


def test_wins_winnable_goals(goals: GoalSet) -> None:
    results = [_play(goals, goal) for goal in range(0, 2000, 5) if goals.winnable(goal)]
    assert len(results) > 390
    assert np.mean([won for won, _ in results]) >= 0.92
    assert 5 < np.mean([len(actions) for _, actions in results]) < 9
    kinds = Counter(choice.kind for _, actions in results for choice in actions)
    assert set(kinds) == {"plan"}


def test_modes_show_the_same_to_it(goals: GoalSet) -> None:
    for goal in range(40):
        assert _play(goals, goal) == _play(goals, goal, mode="text_rich")


@pytest.mark.parametrize(("detour_rate", "error_rate"), [(0.3, 0.0), (0.3, 0.1)])
def test_recovers(goals: GoalSet, detour_rate: float, error_rate: float) -> None:
    results = [_play(goals, goal, detour_rate, error_rate) for goal in range(0, 1000, 5)]
    assert np.mean([won for won, _ in results]) > 0.8
    early = Counter(choice.kind for _, actions in results for choice in actions[:6])
    assert early["detour"] / early.total() == pytest.approx(detour_rate, abs=0.06)
    assert early["mistake"] / early.total() == pytest.approx(error_rate, abs=0.04)


def test_is_seeded(goals: GoalSet) -> None:
    for goal in range(10):
        assert _play(goals, goal, 0.4, 0.2) == _play(goals, goal, 0.4, 0.2)
    with pytest.raises(ValueError, match="detour_rate"):
        WebShopExplorer(WebShopSession(goals.catalogue, goals), np.random.default_rng(0), 0.6, 0.5)


def test_reads_nothing_but_pages(goals: GoalSet, catalogue: Catalogue) -> None:
    """A session that has only its request plays as well: the expert cannot look at the goal behind it."""

    class Blind:
        def __init__(self, instruction: str) -> None:
            self.instruction = instruction

    session = WebShopSession(catalogue, goals)
    observation, info = session.reset(4)
    expert = WebShopExplorer(Blind(session.instruction), np.random.default_rng(4))  # type: ignore[arg-type]
    keys = ("available_actions",)
    actions, done = [], False
    while not done and len(actions) < 15:
        actions.append(expert.act(observation, {key: info[key] for key in keys}))
        observation, _, done, info = session.step(actions[-1].action)
    assert actions == _play(goals, 4)[1]


def test_plays_the_original_shop(original: Catalogue) -> None:
    goals = GoalSet.load(original, human_goals=False)
    results = [_play(goals, goal, 0.1, 0.1) for goal in range(60)]
    assert np.mean([won for won, _ in results]) > 0.1


def test_requests_are_taken_apart() -> None:
    request = parse_request("I am looking for a size 9.5 Oak-Lamp, please, and price lower than 40.00 dollars")
    assert (request.wanted, request.limit) == (("size", "9.5", "oak", "lamp"), 40.0)
    assert parse_request("find me").wanted == ("find", "me") and parse_request("a lamp").limit is None
    assert price_bounds("$1.01 to $1.74") == (1.01, 1.74) and price_bounds("$19.99") == (19.99, 19.99)
    assert best_value(["red", "dark red", "large"], ("a", "dark", "red", "lamp")) == "dark red"
    assert best_value(["9", "9.5"], request.words) == "9.5" and best_value(["teal"], request.words) is None
