# SPDX-License-Identifier: Apache-2.0
"""A deterministic text game of boxes and things with the interface that the credit analysis needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from agent_system.trajectory import SCHEMA_VERSION, Step, Trajectory

BOXES = ("red", "blue", "green")
THINGS = ("apple", "pen")


class ToyGame:
    """Won when the apple lies in the green box. The red and the green box start closed; looking changes nothing."""

    def __init__(self, task: Mapping[str, Any] | None = None) -> None:
        self.start = dict((task or {}).get("things", {"apple": "red", "pen": "blue"}))
        self.steps_taken = 0
        self.reset()

    def reset(self) -> tuple[str, dict[str, Any]]:
        self.at, self.open, self.things = "door", frozenset({"blue"}), dict(self.start)
        return "You are at the door.", self._info()

    def _info(self) -> dict[str, Any]:
        return {"won": self.things["apple"] == "green"}

    @property
    def state_key(self) -> str:
        return json.dumps([self.at, sorted(self.open), sorted(self.things.items())])

    def snapshot(self) -> object:
        return self.at, self.open, tuple(self.things.items())

    def restore(self, snapshot: Any) -> None:
        self.at, self.open, things = snapshot
        self.things = dict(things)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.steps_taken += 1
        text = self._do(action.split())
        won = self._info()["won"]
        return text, 10.0 * won, won, self._info()

    def _do(self, words: list[str]) -> str:
        verb, names = words[0] if words else "", words[1:]
        held = [name for name, place in self.things.items() if place == "hand"]
        if verb == "go" and names[0] != self.at:
            self.at = names[0]
            return f"You are at the {self.at} box."
        if verb in ("open", "close") and names[0] == self.at and (self.at in self.open) == (verb == "close"):
            self.open = self.open ^ {self.at}
            return f"You {verb} it."
        if verb == "take" and not held and self.things[names[0]] == self.at and self.at in self.open:
            self.things[names[0]] = "hand"
            return f"You take the {names[0]}."
        if verb == "put" and held == [names[0]] and self.at in self.open:
            self.things[names[0]] = self.at
            return f"You put the {names[0]} down."
        return f"Here: {self.at}." if verb == "look" else "Nothing happens."


ACTIONS = (
    ["look", "jump"]
    + [f"{verb} {box}" for verb in ("go", "open", "close") for box in BOXES]
    + [f"{verb} {thing}" for verb in ("take", "put") for thing in THINGS]
)


def toy_reveals(action: str, observation: str) -> str | None:
    return action if action.startswith(("go", "open")) and observation != "Nothing happens." else None


class ToyShop:
    """Two items; buying ends the episode with a score: 0.5 for b, 0.2 more with its option, 0.3 with a bag; 0.2 for a.

    Only `click` shows pages; `note` changes nothing at all.
    """

    SCORES: ClassVar = {"a": 0.2, "b": 0.5}

    def __init__(self, task: Mapping[str, Any] | None = None) -> None:
        self.reset()

    def reset(self) -> tuple[str, dict[str, Any]]:
        self.page, self.option, self.bag, self.score = "search", False, False, 0.0
        return "page search", {"won": False, "task_score": 0.0}

    @property
    def state_key(self) -> str:
        return f"{self.page}/{self.option}/{self.bag}/{self.score}"

    def snapshot(self) -> object:
        return self.page, self.option, self.bag, self.score

    def restore(self, snapshot: Any) -> None:
        self.page, self.option, self.bag, self.score = snapshot

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if action in ("click a", "click b") and self.page == "search":
            self.page, self.option = action[-1], False
        elif action == "click back" and self.page in self.SCORES:
            self.page = "search"
        elif action == "option" and self.page == "b":
            self.option = True
        elif action == "bag":
            self.bag = not self.bag
        elif action == "buy" and self.page in self.SCORES:
            self.score = self.SCORES[self.page] + 0.2 * self.option + 0.3 * self.bag
            self.page = "sold"
        done = self.page == "sold"
        won = self.score >= 1.0
        return f"page {self.page}", 10.0 * won, done, {"won": won, "task_score": self.score}


SHOP_ACTIONS = ["click a", "click b", "click back", "option", "bag", "buy", "note"]


def shop_score(reward: float, done: bool, info: Mapping[str, Any]) -> float:
    return float(info["task_score"])


def toy_trajectory(actions: list[str], *, uid: str = "t0", success: bool | None = None, **task: Any) -> Trajectory:
    """Play `actions` to the end (also past a win) and record what happened."""
    game = ToyGame(task)
    observation, _ = game.reset()
    steps, won = [], False
    for index, action in enumerate(actions):
        key = game.state_key
        answer, reward, done, info = game.step(action)
        won = won or info["won"]
        steps.append(Step(index, observation, ACTIONS_TUPLE, None, action, True, reward, done, key))
        observation = answer
    return Trajectory(
        schema_version=SCHEMA_VERSION,
        traj_uid=uid,
        uid=uid,
        env_name="toy/Boxes",
        task={"task_type": "put", **task},
        policy={"kind": "random"},
        success=won if success is None else success,
        episode_reward=10.0 * won,
        task_score=None,
        truncated=False,
        steps=tuple(steps),
        final_observation=observation,
    )


ACTIONS_TUPLE = tuple(ACTIONS)

PLAN = ["go red", "open red", "take apple", "go green", "open green", "put apple"]


def random_success(seed: int, noise: float = 0.6) -> list[str]:
    """The plan with random actions in between; may or may not win."""
    rng = np.random.default_rng(seed)
    actions: list[str] = []
    for step in PLAN:
        while rng.random() < noise:
            actions.append(ACTIONS[int(rng.integers(len(ACTIONS)))])
        actions.append(step)
    return actions


def toy_trajectories(count: int) -> list[Trajectory]:
    """`count` recorded games, successes and failures mixed, unique ids."""
    return [toy_trajectory(random_success(seed), uid=f"t{seed}") for seed in range(count)]
