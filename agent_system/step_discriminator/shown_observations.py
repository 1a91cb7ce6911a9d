# SPDX-License-Identifier: Apache-2.0
"""How an environment's observations are told to a reader of whole episodes, such as the discriminator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from agent_system.trajectory import Trajectory

__all__ = ["shown_observations"]

EpisodeView = Callable[[Sequence[str], Sequence[Sequence[str]]], list[str]]
"""(T + 1 observations, the actions offered at the first T of them) -> T + 1 texts."""

_VIEWS: dict[str, str] = {
    "webshop": "agent_system.environments.env_package.webshop.pages:episode_pages",
}


def shown_observations(trajectory: Trajectory) -> list[str]:
    """T + 1 texts, before each action and after the last one; as recorded unless the environment has a view of its own
    (long pages that come again and again, texts that give the score away)."""
    seen = [step.observation for step in trajectory.steps] + [trajectory.final_observation]
    view = _VIEWS.get(trajectory.env_name.split("/")[0].lower())
    if view is None:
        return seen
    module, _, function = view.partition(":")
    chosen: EpisodeView = getattr(importlib.import_module(module), function)
    return chosen(seen, [step.admissible_actions for step in trajectory.steps])
