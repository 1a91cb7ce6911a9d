# SPDX-License-Identifier: Apache-2.0
"""`WebShopSession`: one customer in the shop, with the state kept for the caller."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.game import State, WebShopText
from agent_system.environments.env_package.webshop.goals import Goal, GoalSet
from agent_system.environments.env_package.webshop.observation import ObservationMode

__all__ = ["Info", "Snapshot", "WebShopSession"]

Info = dict[str, Any]


class Snapshot(NamedTuple):
    """A state of a session; picklable. `shop` names the goals it belongs to."""

    shop: str
    state: State


class WebShopSession:
    """One episode after the other in a shop; catalogue and goals are shared with any number of other sessions.

    `reset(goal_index)` opens the index page of a goal; `step(action)` plays `search[...]` or `click[...]` and ignores
    any other text. Rewards are WebShop's own, 0 to 1, other than 0 only for the purchase that ends an episode. After
    it every step returns the last page again, with reward 0 and done True; only `reset` begins a new episode. The
    caller keeps the step limit.

    Infos: `available_actions` ({"has_search_bar": bool, "clickables": list of str}, of the page just returned),
    `won` (bool: bought, with reward 1.0), `task_score` (float: reward of the purchase, 0.0 before it), `winnable`
    (bool: the goal can be won at all), `goal_index` (int), `asin` (str: the product of the goal).

    Args:
        catalogue: the shop; the one that `goals` belong to.
        goals: what customers ask for.
        observation_mode: "text" or "text_rich".
        show_attributes: see `WebShopText`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        goals: GoalSet,
        observation_mode: ObservationMode = "text",
        show_attributes: bool = False,
    ) -> None:
        if goals.catalogue.hash != catalogue.hash:
            raise ValueError("the goals belong to another catalogue")
        self.rules = WebShopText(catalogue, goals, observation_mode, show_attributes)
        self._state: State | None = None

    @property
    def goal(self) -> Goal:
        """What the customer asks for (not to be shown to agents beyond its text)."""
        return self.rules.goals[self.state.goal]

    @property
    def instruction(self) -> str:
        """The request."""
        return self.goal.instruction_text

    @property
    def state(self) -> State:
        """Where the customer is."""
        if self._state is None:
            raise RuntimeError("reset() comes first")
        return self._state

    @property
    def observation(self) -> str:
        """The page as it was last returned."""
        return self.rules.observe(self.state)

    @property
    def state_key(self) -> str:
        """Hex hash of the goal and where the customer is, selected options included: equal keys mean that equal
        actions lead to equal pages and rewards (text_rich: but for the marks of products opened before).

        Equal across processes and PYTHONHASHSEED values. Which products were opened before does not change it.
        """
        state = self.state
        facts = [self.rules.goals.hash, state.goal, state.page, state.query, state.page_number, state.product]
        text = json.dumps([*facts, sorted(state.options), state.sub], ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]

    def reset(self, goal_index: int) -> tuple[str, Info]:
        """Begin an episode: the index page and infos.

        Raises:
            IndexError: there is no such goal.
        """
        self._state = self.rules.initial(int(goal_index))
        return self.observation, self._info()

    def step(self, action: str) -> tuple[str, float, bool, Info]:
        """Play one action: page, reward, done, infos."""
        self._state, observation, reward, done = self.rules.step(self.state, action)
        return observation, reward, done, self._info()

    def snapshot(self) -> Snapshot:
        """The current state, to go back to with `restore`, here or in another session with the same goals."""
        return Snapshot(self.rules.goals.hash, self.state)

    def restore(self, snapshot: Snapshot) -> Info:
        """Continue from a snapshot; returns the infos of that state (the page is `observation`).

        Raises:
            ValueError: the snapshot was taken with other goals.
        """
        if snapshot.shop != self.rules.goals.hash:
            raise ValueError("the snapshot belongs to another shop or other goals")
        self._state = snapshot.state
        return self._info()

    def close(self) -> None:
        """Forget the episode."""
        self._state = None

    def _info(self) -> Info:
        state = self.state
        return {
            "available_actions": self.rules.available_actions(state),
            "won": state.score == 1.0,
            "task_score": state.score or 0.0,
            "winnable": self.rules.goals.winnable(state.goal),
            "goal_index": state.goal,
            "asin": self.goal.asin,
        }
