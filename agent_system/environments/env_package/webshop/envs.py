# SPDX-License-Identifier: Apache-2.0
"""One customer of a shop as a vector-env slot and as a game to replay, and the public builder of many slots."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agent_system.environments.env_package.webshop.pages import offered_actions, page_text
from agent_system.environments.env_package.webshop.tasks import Shop, shop_of_task
from agent_system.environments.vector_env import Info, Task, VectorEnv, WorkerResources, make_vector_env

if TYPE_CHECKING:
    from agent_system.environments.env_package.webshop.session import WebShopSession

__all__ = ["WIN_REWARD", "WebshopEnv", "WebshopEnvFactory", "WebshopGame", "build_webshop_envs"]

WIN_REWARD = 10.0
"""Reward of a purchase whose task score is 1.0; every other step gives 0, also one after it."""

ObservationMode = Literal["text", "text_rich"]


class WebshopGame:
    """One goal of a shop, to be played from the start as often as wanted.

    Observations are pages without the request (`pages.page_text`). Infos hold `won`, `task_score` (of the purchase, in
    [0, 1]; 0.0 before), `admissible_commands`, `available_actions` as the session gives them, and `state_key`.
    """

    def __init__(self, shop: Shop, goal_index: int, observation_mode: ObservationMode = "text") -> None:
        from agent_system.environments.env_package.webshop.session import WebShopSession

        self.session: WebShopSession = WebShopSession(shop.catalogue, shop.goals, observation_mode)
        self._goal_index = goal_index

    @property
    def state_key(self) -> str:
        """The facts of the session, the selected options among them."""
        return self.session.state_key

    @property
    def state_id(self) -> Hashable:
        """A cheap value that is equal for two states of this game exactly when `state_key` is; for this process."""
        state = self.session.state
        return (state.page, state.query, state.page_number, state.product, frozenset(state.options), state.sub)

    def reset(self) -> tuple[str, Info]:
        """The page with the search bar."""
        observation, info = self.session.reset(self._goal_index)
        return self._page(observation), self._info(info)

    def step(self, action: str) -> tuple[str, float, bool, Info]:
        """Any text is allowed; what the page does not offer changes nothing."""
        observation, score, done, info = self.session.step(action)
        return self._page(observation), WIN_REWARD * (score == 1.0), done, self._info(info)

    def snapshot(self) -> Any:
        """The present state."""
        return self.session.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Continue from a snapshot."""
        self.session.restore(snapshot)

    def _page(self, observation: str) -> str:
        return page_text(observation, self.session.instruction)

    def _info(self, info: Mapping[str, Any]) -> Info:
        available = info["available_actions"]
        return {
            "won": bool(info["won"]),
            "task_score": float(info["task_score"]),
            "available_actions": available,
            "admissible_commands": offered_actions(available),
            "state_key": self.session.state_key,
        }


class WebshopEnv:
    """A slot: plays the goal that a task names."""

    def __init__(self, data_dir: str | None, observation_mode: ObservationMode = "text") -> None:
        """
        Args:
            data_dir: folder of the shop's files; None = $WEBSHOP_DATA.
            observation_mode: `text` or `text_rich`.
        """
        self._data_dir = data_dir
        self._mode: ObservationMode = observation_mode
        self._game: WebshopGame | None = None

    def reset(self, task: Task) -> tuple[str, Info]:
        """Start the goal of a task record (`tasks.Shop.task`)."""
        shop = shop_of_task(task, self._data_dir)
        self._game = WebshopGame(shop, shop.check(task), self._mode)
        return self._game.reset()

    def step(self, action: str) -> tuple[str, float, bool, Info]:
        """See `WebshopGame.step`."""
        assert self._game is not None, "reset comes first"
        return self._game.step(action)

    def close(self) -> None:
        """Forget the session; the catalogue belongs to the process."""
        self._game = None


@dataclass(frozen=True)
class WebshopEnvFactory:
    """Makes slots of one data folder; picklable, so that it can travel to an actor."""

    data_dir: str | None
    observation_mode: ObservationMode = "text"

    def __call__(self) -> WebshopEnv:
        return WebshopEnv(self.data_dir, self.observation_mode)


def build_webshop_envs(
    seed: int,
    env_num: int,
    group_n: int,
    resources_per_worker: Mapping[str, float],
    is_train: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
) -> VectorEnv:
    """`env_num * group_n` slots, under the name and with the arguments that forks call.

    Args:
        seed, is_train: accepted and not read: tasks come with `reset(tasks)`, so slots need no goals and no seed.
        resources_per_worker: `num_cpus`, `num_gpus` of one Ray actor.
        env_kwargs: `data_dir` (None = $WEBSHOP_DATA), `observation_mode` (`text`), `num_workers` (None = by cores, 0 =
            in this process). Other entries are not read.
    """
    options = dict(env_kwargs or {})
    factory = WebshopEnvFactory(options.get("data_dir"), options.get("observation_mode", "text"))
    resources = WorkerResources(**resources_per_worker)
    return make_vector_env(factory, env_num * group_n, options.get("num_workers"), resources)
