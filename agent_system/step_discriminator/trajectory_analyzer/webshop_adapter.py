# SPDX-License-Identifier: Apache-2.0
"""Credit analysis of WebShop goals."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.webshop.pages import revealed_page
from agent_system.step_discriminator.trajectory_analyzer.adapters import EnvAdapter, ReplayableGame

__all__ = ["purchase_score", "webshop_adapter"]


def purchase_score(reward: float, done: bool, info: Mapping[str, Any]) -> float:
    """The shop's score of the purchase, in [0, 1]; 0.0 before it."""
    return float(info["task_score"])


class _WebshopGames:
    """Rebuilds the goal of a task record from the shop in one data folder."""

    def __init__(self, data_dir: str | None) -> None:
        self._data_dir = data_dir

    def __call__(self, task: Mapping[str, Any]) -> ReplayableGame:
        from agent_system.environments.env_package.webshop.envs import WebshopGame
        from agent_system.environments.env_package.webshop.tasks import shop_of_task

        shop = shop_of_task(task, self._data_dir)
        game: ReplayableGame = WebshopGame(shop, shop.check(task))
        return game


def webshop_adapter(data_dir: Path | None) -> EnvAdapter:
    """Shop in `data_dir` (default: $WEBSHOP_DATA), played in text mode: labels do not depend on how pages are shown.

    Raises:
        UserError: no data folder is given, or it does not exist.
    """
    from agent_system.environments.env_package.webshop.catalogue import noun_source
    from agent_system.environments.env_package.webshop.data_files import resolve_data_dir

    folder = resolve_data_dir(data_dir)
    return EnvAdapter(
        make_game=_WebshopGames(str(folder)),
        reveals=revealed_page,
        score=purchase_score,
        state_id=attrgetter("state_id"),
        # Labels below a score of 1.0 depend on it.
        versions={"webshop_nouns": noun_source(folder)},
    )
