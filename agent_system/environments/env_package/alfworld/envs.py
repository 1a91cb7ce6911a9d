# SPDX-License-Identifier: Apache-2.0
"""One ALFWorld slot, and the public builder of many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_system.environments.vector_env import Info, Task, VectorEnv, WorkerResources, make_vector_env

if TYPE_CHECKING:
    from agent_system.environments.env_package.alfworld.game import AlfworldGame

__all__ = ["AlfworldEnv", "AlfworldEnvFactory", "build_alfworld_envs"]


class AlfworldEnv:
    """Plays the game file a task names; a new task replaces the game."""

    def __init__(self, data_dir: str) -> None:
        """
        Args:
            data_dir: folder that the tasks' `gamefile` is relative to.
        """
        self._data_dir = Path(data_dir)
        self._game: AlfworldGame | None = None

    def reset(self, task: Task) -> tuple[str, Info]:
        """Load `task["gamefile"]` and start it."""
        from agent_system.environments.env_package.alfworld.game import AlfworldGame

        self._game = AlfworldGame(self._data_dir / task["gamefile"])
        observation, info = self._game.reset()
        return observation, self._info(info)

    def step(self, action: str) -> tuple[str, float, bool, Info]:
        """Any text is allowed; what is not admissible changes nothing."""
        assert self._game is not None, "reset comes first"
        observation, reward, done, info = self._game.step(action)
        return observation, reward, done, self._info(info)

    def close(self) -> None:
        """Forget the game."""
        self._game = None

    def _info(self, info: Info) -> Info:
        assert self._game is not None
        info["state_key"] = self._game.state_key
        info["task_score"] = float(info["won"])
        return info


@dataclass(frozen=True)
class AlfworldEnvFactory:
    """Makes slots of one data folder; picklable, so that it can travel to an actor."""

    data_dir: str

    def __call__(self) -> AlfworldEnv:
        return AlfworldEnv(self.data_dir)


def build_alfworld_envs(
    alf_config_path: str | None,
    seed: int,
    env_num: int,
    group_n: int,
    resources_per_worker: Mapping[str, float],
    is_train: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
) -> VectorEnv:
    """`env_num * group_n` slots, under the name and with the arguments that forks call.

    Args:
        alf_config_path, seed, is_train: accepted and not read: tasks come with `reset(tasks)`, so slots need no game
            list and no seed of their own.
        resources_per_worker: `num_cpus`, `num_gpus` of one Ray actor.
        env_kwargs: `data_dir` (required), `num_workers` (None = by cores, 0 = in this process).
    """
    options = dict(env_kwargs or {})
    if "data_dir" not in options:
        raise ValueError("build_alfworld_envs needs env_kwargs={'data_dir': ...}, the folder the game files are in")
    return make_vector_env(
        AlfworldEnvFactory(str(options["data_dir"])),
        env_num * group_n,
        options.get("num_workers"),
        WorkerResources(**resources_per_worker),
    )
