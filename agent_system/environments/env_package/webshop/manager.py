# SPDX-License-Identifier: Apache-2.0
"""The WebShop manager, and its construction from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from agent_system.environments.base import EnvironmentManagerBase, Projection
from agent_system.environments.env_package.webshop.data_files import resolve_data_dir
from agent_system.environments.env_package.webshop.envs import WebshopEnvFactory
from agent_system.environments.env_package.webshop.pages import extract_task, is_offered
from agent_system.environments.env_package.webshop.projection import webshop_projection
from agent_system.environments.env_package.webshop.prompt_builder import WebshopPromptBuilder
from agent_system.environments.env_package.webshop.tasks import (
    LEGACY_VAL_GOALS,
    GoalStream,
    GoalTasks,
    LegacyGoalStream,
    Shop,
    ShopSettings,
    open_shop,
)
from agent_system.environments.run_config import DataSection, EnvSection, make_slots
from agent_system.environments.task_stream import TaskStream
from agent_system.environments.vector_env import Info, VectorEnv
from agent_system.trajectory import task_key
from verl.utils.errors import UserError

__all__ = ["SCORE_KEY", "WebshopEnvironmentManager", "make_webshop_manager"]

logger = logging.getLogger(__name__)

SCORE_KEY = "webshop_task_score (not success_rate)"
WINNABLE_KEY = "winnable_success_rate"


class _GeneratedSection(Protocol):
    @property
    def dir(self) -> str | None: ...
    @property
    def products(self) -> int: ...
    @property
    def goals(self) -> int: ...
    @property
    def seed(self) -> int: ...


class _WebshopSection(Protocol):
    @property
    def use_small(self) -> bool: ...
    @property
    def human_goals(self) -> bool: ...
    @property
    def data_dir(self) -> str | None: ...
    @property
    def source(self) -> str: ...
    @property
    def generated(self) -> _GeneratedSection: ...
    @property
    def split(self) -> Literal["goal", "product"] | None: ...
    @property
    def legacy_goal_order(self) -> bool: ...
    @property
    def val_goals(self) -> int | None: ...
    @property
    def option_match(self) -> Literal["upstream", "fixed"]: ...
    @property
    def observation_mode(self) -> Literal["text", "text_rich"]: ...
    @property
    def prompt_style(self) -> Literal["full", "compact"]: ...


class _EnvSection(EnvSection, Protocol):
    @property
    def webshop(self) -> _WebshopSection: ...


class WebshopRunConfig(Protocol):
    """What building the managers reads of the configuration."""

    @property
    def env(self) -> _EnvSection: ...
    @property
    def data(self) -> DataSection: ...


class WebshopEnvironmentManager(EnvironmentManagerBase):
    """A text shop.

    Observation and anchor are the page without the request; the reward is 10 for a purchase with task score 1.0, else
    0. Success keys: `success_rate`; `webshop_task_score (not success_rate)`, the mean score of the purchases (0 where
    none was made); `winnable_success_rate`, the success over the goals that can reach 1.0 at all.
    """

    def __init__(self, envs: VectorEnv, projection_f: Projection, config: WebshopRunConfig, **options: Any) -> None:
        """`options` are the keyword arguments of `EnvironmentManagerBase`; `env_name` defaults to `webshop`."""
        super().__init__(envs, projection_f, config, **{"env_name": "webshop", **options})
        self.builder = WebshopPromptBuilder(config.env.webshop.prompt_style, config.env.history_length)

    @staticmethod
    def extract_task(observation: str) -> str:
        """The request of a session's first page in text mode; ValueError when there is none."""
        return extract_task(observation)

    def is_offered(self, action: str, offered: Sequence[str]) -> bool:
        """Any query is offered where the page has a search bar."""
        return is_offered(action, offered)

    def _process_batch(
        self,
        batch_idx: int,
        total_batch_list: Sequence[Sequence[Mapping[str, Any]]],
        total_infos: Sequence[Sequence[Info]],
        success: dict[str, list[float]],
    ) -> None:
        info = self._last_active(batch_idx, total_batch_list, total_infos)
        won = float(info["won"])
        success["success_rate"].append(won)
        success[SCORE_KEY].append(float(info["task_score"]))
        if info["task"]["winnable"]:
            success[WINNABLE_KEY].append(won)


def shop_settings(section: _WebshopSection) -> ShopSettings:
    """The settings that the configuration asks for; makes the generated shop when it is missing.

    Raises:
        UserError: contradicting keys, or the shop cannot be made.
    """
    ignored = {"split": section.split, "val_goals": section.val_goals}
    given = [f"env.webshop.{name}={value}" for name, value in ignored.items() if value is not None]
    if section.legacy_goal_order and given:
        raise UserError(
            f"env.webshop.legacy_goal_order=True and {' and '.join(given)}: in that order every group shuffles the "
            "goals for itself and nothing is held out; set only one of them."
        )
    data_dir = section.data_dir
    if section.source == "generated":
        from agent_system.environments.env_package.webshop.generate import ensure_generated

        if section.data_dir is not None:
            raise UserError(
                f"env.webshop.source=generated and env.webshop.data_dir={section.data_dir}: a generated shop lies in "
                "env.webshop.generated.dir; set only one of them (a folder that generate_catalogue wrote is read with "
                "env.webshop.source=data)."
            )
        shop = section.generated
        data_dir = str(ensure_generated(shop.dir, products=shop.products, goals=shop.goals, seed=shop.seed))
    # One spelling of the folder, so that every part of a process finds the same loaded shop.
    data_dir = str(resolve_data_dir(data_dir))
    return ShopSettings(data_dir, section.use_small, section.human_goals, section.option_match)


def _split_mode(shop: Shop, section: _WebshopSection) -> Literal["goal", "product"]:
    return section.split or ("product" if shop.catalogue.generated else "goal")


def split_tasks(shop: Shop, section: _WebshopSection, is_train: bool) -> GoalTasks:
    """The tasks of training or of validation in their fixed order; no goal (or product) is in both.

    Raises:
        UserError: the split leaves one side empty.
    """
    split = shop.goals.split(_split_mode(shop, section))
    tasks = GoalTasks(shop, split["train" if is_train else "val"])
    if is_train or section.val_goals is None or section.val_goals >= len(tasks):
        return tasks
    return GoalTasks(shop, tasks.indices[np.arange(section.val_goals) * len(tasks) // section.val_goals])


def _legacy_stream(
    settings: ShopSettings, num_goals: int, seed: int, num_groups: int, is_train: bool
) -> LegacyGoalStream:
    numbers = range(LEGACY_VAL_GOALS, num_goals) if is_train else range(min(LEGACY_VAL_GOALS, num_goals))
    if not numbers:
        raise UserError(
            f"env.webshop.legacy_goal_order=True trains on goals from {LEGACY_VAL_GOALS} on, and the shop in "
            f"{settings.data_dir} has {num_goals}; set it to False or use a larger shop."
        )
    return LegacyGoalStream(settings, numbers, seed, num_groups)


def make_webshop_manager(config: WebshopRunConfig, is_train: bool) -> WebshopEnvironmentManager:
    """Manager of the training goals, or of the held-out ones.

    Raises:
        UserError: no data, a broken file, or a split without goals.
    """
    env, section = config.env, config.env.webshop
    settings = shop_settings(section)
    shop = open_shop(settings)
    seed = env.seed if is_train else env.seed + 1000
    num_groups = config.data.train_batch_size
    if not is_train and config.data.val_batch_size is not None:
        num_groups = config.data.val_batch_size
    stream: TaskStream
    if section.legacy_goal_order:
        stream = _legacy_stream(settings, len(shop.goals), seed, num_groups, is_train)
        panel_hash = task_key({"tasks": [task_key(task) for task in stream.tasks]})
    else:
        tasks = split_tasks(shop, section, is_train)
        stream, panel_hash = GoalStream(tasks, seed), tasks.hash
    metadata = _metadata(shop, section)
    side = "training" if is_train else "validation"
    logger.info("WebShop %s: %s", side, ", ".join(f"{name}={value}" for name, value in metadata.items()))
    num_slots = num_groups * max(env.rollout.n, 1) if is_train else num_groups
    factory = WebshopEnvFactory(settings.data_dir, section.observation_mode)
    manager = WebshopEnvironmentManager(
        make_slots(env, factory, num_slots),
        webshop_projection,
        config,
        split="train" if is_train else "val",
        panel_hash=panel_hash,
        data_dir=Path(shop.catalogue.data_dir),
        metadata=metadata,
    )
    manager.task_stream = stream
    return manager


def _metadata(shop: Shop, section: _WebshopSection) -> dict[str, Any]:
    """What a run's record says: the shop, the noun extractor, the split, whether it holds goals out and how much its
    sides share."""
    record = {**shop.metadata(), "observation_mode": section.observation_mode}
    if section.legacy_goal_order:
        return {**record, "split": "legacy_goal_order", "held_out": False}
    mode = _split_mode(shop, section)
    return {**record, "split": mode, "held_out": True, "overlap": shop.goals.overlap(shop.goals.split(mode))}
