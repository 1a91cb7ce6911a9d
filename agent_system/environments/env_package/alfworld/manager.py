# SPDX-License-Identifier: Apache-2.0
"""The ALFWorld manager, and its construction from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agent_system.environments.base import EnvironmentManagerBase, Projection
from agent_system.environments.env_package.alfworld.envs import AlfworldEnvFactory
from agent_system.environments.env_package.alfworld.projection import alfworld_projection
from agent_system.environments.env_package.alfworld.prompt_builder import (
    TASK_MARKER,
    AlfworldPromptBuilder,
    extract_task,
)
from agent_system.environments.run_config import DataSection, EnvSection, make_slots
from agent_system.environments.vector_env import Info, VectorEnv
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from agent_system.environments.env_package.alfworld.manifest import Manifest

__all__ = ["AlfWorldEnvironmentManager", "make_alfworld_manager"]

logger = logging.getLogger(__name__)

# Looked for in this order in the game file's path; the key is the name plus `_success_rate`.
TASK_NAMES = (
    "pick_and_place",
    "pick_two_obj_and_place",
    "look_at_obj_in_light",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_clean_then_place_in_recep",
)
_SPLITS = {"eval_in_distribution": "valid_seen", "eval_out_of_distribution": "valid_unseen"}


class _GeneratedSection(Protocol):
    @property
    def dir(self) -> str | None: ...
    @property
    def train(self) -> int: ...
    @property
    def valid_seen(self) -> int: ...
    @property
    def valid_unseen(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_receptacles(self) -> int | None: ...
    @property
    def max_objects(self) -> int | None: ...
    @property
    def max_object_classes(self) -> int | None: ...


class _AlfworldSection(Protocol):
    @property
    def eval_dataset(self) -> str: ...
    @property
    def data_dir(self) -> str | None: ...
    @property
    def source(self) -> str: ...
    @property
    def generated(self) -> _GeneratedSection: ...
    @property
    def prompt_style(self) -> Literal["full", "compact"]: ...


class _EnvSection(EnvSection, Protocol):
    @property
    def env_name(self) -> str: ...
    @property
    def alfworld(self) -> _AlfworldSection: ...


class _TrainerSection(Protocol):
    @property
    def val_out(self) -> bool: ...


class AlfworldRunConfig(Protocol):
    """What building the managers reads of the configuration."""

    @property
    def env(self) -> _EnvSection: ...
    @property
    def data(self) -> DataSection: ...
    @property
    def trainer(self) -> _TrainerSection: ...


class AlfWorldEnvironmentManager(EnvironmentManagerBase):
    """Text games of ALFWorld.

    Observation and anchor are the game's text as it comes (the first one with its banner and task); the reward is 10
    on the winning turn. Success keys: `success_rate` and one `<task name>_success_rate` per task type that was played.
    """

    def __init__(self, envs: VectorEnv, projection_f: Projection, config: AlfworldRunConfig, **options: Any) -> None:
        """`options` are the keyword arguments of `EnvironmentManagerBase`; `env_name` defaults to `alfworld`."""
        super().__init__(envs, projection_f, config, **{"env_name": "alfworld", **options})
        self.builder = AlfworldPromptBuilder(config.env.alfworld.prompt_style, config.env.history_length)
        self._instructions: list[str] = []

    @staticmethod
    def extract_task(observation: str) -> str:
        """The task sentence of a first observation; ValueError when there is none."""
        return extract_task(observation)

    def on_reset(self, observations: Sequence[str], infos: Sequence[Info]) -> None:
        self._instructions = [extract_task(observation) for observation in observations]

    def instruction(self, slot: int) -> str:
        """See `EnvironmentManagerBase.instruction`."""
        return self._instructions[slot]

    def task_record(self, slot: int) -> dict[str, Any]:
        return {**self._tasks[slot], "instruction": TASK_MARKER + self._instructions[slot]}

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
        for name in TASK_NAMES:
            if name in info["task"]["gamefile"]:
                success[f"{name}_success_rate"].append(won)
                break


def _load_split(config: AlfworldRunConfig, split: str) -> Manifest:
    from agent_system.environments.env_package.alfworld.generate import ensure_generated
    from agent_system.environments.env_package.alfworld.manifest import load_manifest

    section = config.env.alfworld
    if section.source != "generated":
        return load_manifest(section.data_dir, split)
    games = section.generated
    folder = ensure_generated(
        games.dir,
        train=games.train,
        valid_seen=games.valid_seen,
        valid_unseen=games.valid_unseen,
        seed=games.seed,
        max_receptacles=games.max_receptacles,
        max_objects=games.max_objects,
        max_object_classes=games.max_object_classes,
    )
    return load_manifest(folder, split)


def make_alfworld_manager(config: AlfworldRunConfig, is_train: bool) -> AlfWorldEnvironmentManager:
    """Manager of the training split, or of the validation split that the configuration names.

    Raises:
        UserError: the visual environment is asked for, or the split has no game.
    """
    env = config.env
    if "thor" in env.env_name.lower():
        raise UserError(f"env.env_name={env.env_name}: only the text games are supported; set alfworld/AlfredTWEnv.")
    eval_dataset = "eval_out_of_distribution" if config.trainer.val_out else env.alfworld.eval_dataset
    split = "train" if is_train else _SPLITS[eval_dataset]
    manifest = _load_split(config, split)
    logger.info("ALFWorld games in %s: %s", manifest.data_dir, manifest.summary())
    tasks = [{"gamefile": game.path, "sha256": game.sha256, "task_type": game.task_type} for game in manifest.games]
    if is_train:
        num_slots = config.data.train_batch_size * max(env.rollout.n, 1)
    else:
        num_slots = config.data.val_batch_size or min(len(tasks), config.data.train_batch_size)
    factory = AlfworldEnvFactory(str(manifest.data_dir))
    return AlfWorldEnvironmentManager(
        make_slots(env, factory, num_slots),
        alfworld_projection,
        config,
        env_name="alfworld",
        tasks=tasks,
        seed=env.seed if is_train else env.seed + 1000,
        split=split,
        panel_hash=manifest.hash,
        data_dir=manifest.data_dir,
    )
