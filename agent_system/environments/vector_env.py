# SPDX-License-Identifier: Apache-2.0
"""Many single environments behind one object: in this process, or spread over Ray actors with many slots each
(`ray_vector_env`). Nothing here imports torch or Ray, so that an environment actor stays small.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.utils.errors import UserError

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "EnvironmentFailure",
    "LocalVectorEnv",
    "SlotHost",
    "TextEnv",
    "VectorEnv",
    "WorkerResources",
    "describe_task",
    "make_vector_env",
]

Task = dict[str, Any]
Info = dict[str, Any]
StepResult = tuple[list[str], list[float], list[bool], list[Info]]

DEFAULT_TIMEOUT_S = 300.0


class EnvironmentFailure(RuntimeError):
    """An environment crashed, its process died, or it did not answer in time; the message names slot and task."""


class TextEnv(Protocol):
    """One environment instance, used for one episode after another.

    `info` of both calls needs `won` (bool), `admissible_commands` (list of str) and `state_key` (str).
    """

    def reset(self, task: Task) -> tuple[str, Info]:
        """Start an episode of `task`; (observation, info)."""

    def step(self, action: str) -> tuple[str, float, bool, Info]:
        """Any text is an allowed action; (observation, reward, done, info)."""

    def close(self) -> None:
        """Release what the environment holds."""


TextEnvFactory = Callable[[], TextEnv]
"""Makes one environment; it travels to actors, so it must be picklable."""


class VectorEnv(ABC):
    """`num_slots` environments. Slot numbers count from 0; results come back in the order asked for."""

    num_slots: int

    @abstractmethod
    def reset(self, tasks: Sequence[Task]) -> tuple[list[str], list[Info]]:
        """Start an episode of `tasks[i]` in slot i; fewer tasks than slots use the first slots.

        Raises:
            ValueError: more tasks than slots.
            EnvironmentFailure: a slot crashed, died or timed out.
            UserError: a task's files are missing or unreadable.
        """

    @abstractmethod
    def step(self, slots: Sequence[int], actions: Sequence[str]) -> StepResult:
        """Send `actions[i]` to slot `slots[i]`; the other slots stay as they are.

        Raises:
            ValueError: not one action per distinct, started slot.
            EnvironmentFailure: a slot crashed, died or timed out.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; calling it twice is fine."""

    def _check_tasks(self, tasks: Sequence[Task]) -> None:
        if len(tasks) > self.num_slots:
            raise ValueError(f"{len(tasks)} tasks for {self.num_slots} environment slots")

    def _check_step(self, slots: Sequence[int], actions: Sequence[str], num_started: int) -> None:
        if len(slots) != len(actions) or len(set(slots)) != len(slots):
            raise ValueError(f"{len(actions)} actions for slots {list(slots)}: one action per distinct slot is needed")
        for slot in slots:
            if not 0 <= slot < num_started:
                raise ValueError(f"slot {slot} has no episode; {num_started} slots were reset")


@dataclass(frozen=True)
class WorkerResources:
    """Ray resources of one environment actor."""

    num_cpus: float = 0.1
    num_gpus: float = 0.0


def describe_task(task: Task) -> str:
    """A task's name for messages: its file or name, else the start of its record."""
    name = task.get("gamefile") or task.get("name")
    return str(name) if name else str(task)[:200]


class SlotHost:
    """The slots of one process; also what a Ray actor runs. Errors leave with the slot's and the task's name, user
    errors unchanged."""

    def __init__(self, factory: TextEnvFactory, slots: Sequence[int]) -> None:
        self._factory = factory
        self._envs: dict[int, TextEnv | None] = dict.fromkeys(slots)
        self._tasks: dict[int, Task] = {}
        self._running: tuple[int, str, float] | None = None

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> tuple[list[str], list[Info]]:
        observations, infos = [], []
        for slot, task in zip(slots, tasks):
            self._tasks[slot] = task
            self._running = (slot, "reset", time.monotonic())
            env = self._envs[slot]
            try:
                if env is None:
                    env = self._envs[slot] = self._factory()
                observation, info = env.reset(task)
            except UserError:
                raise
            except Exception as error:
                raise EnvironmentFailure(self._message(slot, "reset", error)) from error
            observations.append(observation)
            infos.append(info)
        return observations, infos

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> StepResult:
        observations, rewards, dones, infos = [], [], [], []
        for slot, action in zip(slots, actions):
            env = self._envs[slot]
            assert env is not None, f"slot {slot} was stepped before its first reset"
            self._running = (slot, f"step({action[:80]!r})", time.monotonic())
            try:
                observation, reward, done, info = env.step(action)
            except Exception as error:
                raise EnvironmentFailure(self._message(slot, f"step({action[:80]!r})", error)) from error
            observations.append(observation)
            rewards.append(float(reward))
            dones.append(bool(done))
            infos.append(info)
        return observations, rewards, dones, infos

    def replay(
        self, slots: Sequence[int], tasks: Sequence[Task], actions: Sequence[Sequence[str]]
    ) -> list[list[tuple[str, str]]]:
        """Play recorded episodes again, each from its start; per slot, (observation, state key) after every call."""
        seen = []
        for slot, task, played in zip(slots, tasks, actions):
            observations, infos = self.reset([slot], [task])
            turns = [(observations[0], infos[0]["state_key"])]
            for action in played:
                observations, _, _, infos = self.step([slot], [action])
                turns.append((observations[0], infos[0]["state_key"]))
            seen.append(turns)
        return seen

    def running(self) -> tuple[int, str, float] | None:
        """The call that was started last: slot, what it does, and for how many seconds; answers from another thread."""
        if self._running is None:
            return None
        slot, call, start = self._running
        return slot, call, time.monotonic() - start

    def close(self) -> None:
        for slot, env in self._envs.items():
            if env is not None:
                env.close()
                self._envs[slot] = None

    def _message(self, slot: int, call: str, error: Exception) -> str:
        reason = f"{type(error).__name__}: {error}"
        return f"environment slot {slot}, task {describe_task(self._tasks[slot])}: {call} raised {reason}"


class LocalVectorEnv(VectorEnv):
    """All slots in this process, one after the other. Right for fast environments and for tests."""

    def __init__(self, factory: TextEnvFactory, num_slots: int) -> None:
        self.num_slots = num_slots
        self._host = SlotHost(factory, range(num_slots))
        self._num_started = 0

    def reset(self, tasks: Sequence[Task]) -> tuple[list[str], list[Info]]:
        self._check_tasks(tasks)
        self._num_started = len(tasks)
        return self._host.reset(range(len(tasks)), tasks)

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> StepResult:
        self._check_step(slots, actions, self._num_started)
        return self._host.step(slots, actions)

    def close(self) -> None:
        self._host.close()


def make_vector_env(
    factory: TextEnvFactory,
    num_slots: int,
    num_workers: int | None,
    resources: WorkerResources,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> VectorEnv:
    """`env.num_workers`: null = actors by core count, 0 = in this process, n = n Ray actors.

    Args:
        timeout_s: seconds one reset or step of an actor may take (`env.worker_timeout`); not used in this process.
    """
    if num_workers == 0:
        return LocalVectorEnv(factory, num_slots)
    from agent_system.environments.ray_vector_env import RayVectorEnv

    return RayVectorEnv(factory, num_slots, num_workers, resources, timeout_s=timeout_s)
