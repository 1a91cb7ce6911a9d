# SPDX-License-Identifier: Apache-2.0
"""Scripted experts by environment: which tasks there are to play, and who plays them.

A source travels to worker processes, so it must be picklable; heavy imports are inside its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agent_system.step_discriminator.trajectory_analyzer.adapters import ReplayableGame, base_env_name
from agent_system.step_discriminator.trajectory_analyzer.alfworld_adapter import ALFWORLD_ENV_NAME
from verl.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "AlfworldExperts",
    "Expert",
    "ExpertMove",
    "ExpertOptions",
    "ExpertSource",
    "ExpertTask",
    "WebshopExperts",
    "expert_source",
    "known_sources",
]


class ExpertMove(Protocol):
    """What an expert decides."""

    @property
    def action(self) -> str: ...
    @property
    def thought(self) -> str: ...
    @property
    def kind(self) -> str: ...


class Expert(Protocol):
    """Plays one episode."""

    def act(self, observation: str, info: dict[str, Any]) -> ExpertMove:
        """The next action, given the text just seen and its infos."""


class ExpertOptions(Protocol):
    """How an expert plays."""

    @property
    def detour_rate(self) -> float: ...
    @property
    def error_rate(self) -> float: ...


@dataclass(frozen=True)
class ExpertTask:
    """A task to play. `name` is the same on every machine; group ids and random streams are made of it."""

    name: str
    task: Mapping[str, Any]
    """As in trajectory records; `instruction` may be missing."""


@dataclass(frozen=True)
class OpenTask:
    """A task ready to be played."""

    game: ReplayableGame
    expert: Expert
    task: Mapping[str, Any]
    """The complete record."""


class ExpertSource(Protocol):
    """Tasks of one data folder and their expert."""

    @property
    def env_name(self) -> str:
        """As in trajectory records."""

    @property
    def max_steps(self) -> int:
        """Usual step limit of an episode."""

    def tasks(self, split: str) -> Sequence[ExpertTask]:
        """The tasks of a split in a fixed order; UserError for an unknown split or missing data."""

    def start(self, task: ExpertTask, rng: np.random.Generator, options: ExpertOptions, max_steps: int) -> OpenTask:
        """The game of a task and a fresh expert for it."""

    def generate(self, split: str, count: int, seed: int) -> None:
        """Make `count` tasks for the split in the source's data folder, which has none yet."""


@dataclass(frozen=True)
class AlfworldExperts:
    """The explorer in ALFWorld games. `data_dir`: None = $ALFWORLD_DATA, then ~/.cache/alfworld."""

    data_dir: Path | None = None
    env_name: str = ALFWORLD_ENV_NAME
    max_steps: int = 50

    def tasks(self, split: str) -> Sequence[ExpertTask]:
        """The playable games of train, valid_seen or valid_unseen."""
        from agent_system.environments.env_package.alfworld.manifest import load_manifest

        return [
            ExpertTask(game.path, {"gamefile": game.path, "sha256": game.sha256, "task_type": game.task_type})
            for game in load_manifest(self.data_dir, split).games
        ]

    def start(self, task: ExpertTask, rng: np.random.Generator, options: ExpertOptions, max_steps: int) -> OpenTask:
        """See `ExpertSource.start`."""
        from agent_system.environments.env_package.alfworld import AlfworldGame
        from agent_system.environments.env_package.alfworld.experts import Explorer
        from agent_system.environments.env_package.alfworld.manifest import resolve_data_dir

        game = AlfworldGame(resolve_data_dir(self.data_dir) / task.task["gamefile"])
        expert = Explorer(game, rng, options.detour_rate, options.error_rate, max_steps)
        return OpenTask(game, expert, {**task.task, "instruction": game.task})

    def generate(self, split: str, count: int, seed: int) -> None:
        """Generated games of one split only."""
        from agent_system.environments.env_package.alfworld.generate import generate_games
        from agent_system.environments.env_package.alfworld.manifest import SPLITS, check_split

        if self.data_dir is None:
            raise UserError("--generate needs --data-dir, the folder that gets the games.")
        check_split(split)
        generate_games(self.data_dir, **{name: count if name == split else 0 for name in SPLITS}, seed=seed)


@dataclass(frozen=True)
class WebshopExperts:
    """The explorer in a shop. `data_dir`: None = $WEBSHOP_DATA.

    Goals are those of the small product files, synthetic ones unless the shop is generated; the splits hold no product
    in common, so that what is learned on one can be judged on the other.
    """

    data_dir: Path | None = None
    env_name: str = "webshop"
    max_steps: int = 15

    def tasks(self, split: str) -> Sequence[ExpertTask]:
        """The goals of train or val that can be won."""
        from agent_system.environments.env_package.webshop.tasks import GoalTasks, open_shop

        shop = open_shop(self._settings())
        parts = shop.goals.split("product")
        if split not in parts:
            raise UserError(f"Unknown WebShop split {split!r}; choose one of {', '.join(parts)}.")
        tasks = GoalTasks(shop, parts[split])
        return [ExpertTask(f"{task['goal_asin']}/{task['goal_index']}", task) for task in tasks if task["winnable"]]

    def start(self, task: ExpertTask, rng: np.random.Generator, options: ExpertOptions, max_steps: int) -> OpenTask:
        """See `ExpertSource.start`."""
        from agent_system.environments.env_package.webshop.envs import WebshopGame
        from agent_system.environments.env_package.webshop.experts import WebShopExplorer
        from agent_system.environments.env_package.webshop.tasks import open_shop

        game = WebshopGame(open_shop(self._settings()), task.task["goal_index"])
        expert = WebShopExplorer(game.session, rng, options.detour_rate, options.error_rate, max_steps)
        return OpenTask(game, expert, task.task)

    def generate(self, split: str, count: int, seed: int) -> None:
        """A generated shop with `count` goals in all (both splits), half as many products."""
        from agent_system.environments.env_package.webshop.generate import generate_catalogue

        if self.data_dir is None:
            raise UserError("--generate needs --data-dir, the folder that gets the shop.")
        generate_catalogue(self.data_dir, products=max(count // 2, 1), goals=count, seed=seed)

    def _settings(self) -> Any:
        from agent_system.environments.env_package.webshop.data_files import resolve_data_dir
        from agent_system.environments.env_package.webshop.tasks import ShopSettings

        return ShopSettings(str(resolve_data_dir(self.data_dir)))


SourceBuilder = Callable[[Path | None], ExpertSource]

_SOURCES: dict[str, SourceBuilder] = {"alfworld": AlfworldExperts, "webshop": WebshopExperts}


def known_sources() -> tuple[str, ...]:
    """Environments with a scripted expert."""
    return tuple(_SOURCES)


def expert_source(env_name: str, data_dir: Path | None) -> ExpertSource:
    """The expert's tasks of an environment; UserError with the known names otherwise."""
    name = base_env_name(env_name)
    if name not in _SOURCES:
        raise UserError(f"--env {env_name}: scripted experts play {', '.join(_SOURCES)}.")
    return _SOURCES[name](data_dir)
