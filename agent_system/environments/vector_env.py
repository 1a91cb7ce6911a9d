# SPDX-License-Identifier: Apache-2.0
"""Many single environments behind one object: in this process, or spread over Ray actors with many slots each.

Nothing here imports torch, so that an environment actor stays small. Ray is imported when the Ray version is built.
"""

from __future__ import annotations

import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.utils.errors import UserError

__all__ = [
    "EnvironmentFailure",
    "LocalVectorEnv",
    "RayVectorEnv",
    "TextEnv",
    "VectorEnv",
    "WorkerResources",
    "default_num_workers",
    "make_vector_env",
]

logger = logging.getLogger(__name__)

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


def _first_and_last_line(error: Exception) -> str:
    """Ray's message in short: what happened and, when a traceback follows, its last line; without colours."""
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1].strip()])) if lines else type(error).__name__


def _describe(task: Task) -> str:
    name = task.get("gamefile") or task.get("name")
    return str(name) if name else str(task)[:200]


class _SlotHost:
    """The slots of one process. Errors leave with the slot's and the task's name, user errors unchanged."""

    def __init__(self, factory: TextEnvFactory, slots: Sequence[int]) -> None:
        self._factory = factory
        self._envs: dict[int, TextEnv | None] = dict.fromkeys(slots)
        self._tasks: dict[int, Task] = {}

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> tuple[list[str], list[Info]]:
        observations, infos = [], []
        for slot, task in zip(slots, tasks):
            self._tasks[slot] = task
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
            try:
                observation, reward, done, info = env.step(action)
            except Exception as error:
                raise EnvironmentFailure(self._message(slot, f"step({action[:80]!r})", error)) from error
            observations.append(observation)
            rewards.append(float(reward))
            dones.append(bool(done))
            infos.append(info)
        return observations, rewards, dones, infos

    def close(self) -> None:
        for slot, env in self._envs.items():
            if env is not None:
                env.close()
                self._envs[slot] = None

    def _message(self, slot: int, call: str, error: Exception) -> str:
        reason = f"{type(error).__name__}: {error}"
        return f"environment slot {slot}, task {_describe(self._tasks[slot])}: {call} raised {reason}"


class LocalVectorEnv(VectorEnv):
    """All slots in this process, one after the other. Right for fast environments and for tests."""

    def __init__(self, factory: TextEnvFactory, num_slots: int) -> None:
        self.num_slots = num_slots
        self._host = _SlotHost(factory, range(num_slots))
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


def default_num_workers(num_slots: int) -> int:
    """Environment actors for `num_slots` slots: 16 slots an actor, at most one actor per core."""
    return max(1, min(os.cpu_count() or 1, math.ceil(num_slots / 16)))


class RayVectorEnv(VectorEnv):
    """Slots spread in equal, contiguous blocks over `num_workers` Ray actors (a group's members share an actor, and
    with it the loaded game). One remote call per actor and turn. Actors start with the first reset."""

    def __init__(
        self,
        factory: TextEnvFactory,
        num_slots: int,
        num_workers: int | None = None,
        resources: WorkerResources | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """
        Args:
            factory: makes one environment; it travels to the actors, so it must be picklable.
            num_slots: number of environments.
            num_workers: number of actors (None = `default_num_workers`); never more than slots.
            resources: Ray resources of one actor.
            timeout_s: how long one reset or step of an actor may take, in seconds.
        """
        if num_slots < 1 or (num_workers is not None and num_workers < 1):
            raise ValueError(f"num_slots={num_slots} and num_workers={num_workers} must be at least 1")
        self.num_slots = num_slots
        self.num_workers = min(num_workers or default_num_workers(num_slots), num_slots)
        self._factory = factory
        self._resources = resources or WorkerResources()
        self._timeout_s = timeout_s
        bounds = [num_slots * i // self.num_workers for i in range(self.num_workers + 1)]
        self._blocks = [range(bounds[i], bounds[i + 1]) for i in range(self.num_workers)]
        self._worker_of = [worker for worker, block in enumerate(self._blocks) for _ in block]
        self._actors: list[Any] = []
        self._tasks: list[Task] = []

    def reset(self, tasks: Sequence[Task]) -> tuple[list[str], list[Info]]:
        self._check_tasks(tasks)
        self._start()
        self._tasks = list(tasks)
        parts = self._split(range(len(tasks)))
        results = self._call("reset", {w: (slots, [tasks[s] for s in slots]) for w, slots in parts.items()})
        # Blocks are contiguous and in order, so concatenation restores the slot order.
        observations = [obs for w in parts for obs in results[w][0]]
        infos = [info for w in parts for info in results[w][1]]
        return observations, infos

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> StepResult:
        self._check_step(slots, actions, len(self._tasks))
        action_of = dict(zip(slots, actions))
        parts = self._split(slots)
        results = self._call("step", {w: (mine, [action_of[s] for s in mine]) for w, mine in parts.items()})
        row_of = {slot: (w, i) for w, mine in parts.items() for i, slot in enumerate(mine)}
        where = [row_of[slot] for slot in slots]
        observations, rewards, dones, infos = ([results[w][column][i] for w, i in where] for column in range(4))
        return observations, rewards, dones, infos

    def close(self) -> None:
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor)
        self._actors = []
        self._tasks = []

    def _start(self) -> None:
        if self._actors:
            return
        import ray

        if not ray.is_initialized():
            raise RuntimeError("RayVectorEnv needs a running Ray; call ray.init() first or use LocalVectorEnv")
        options = {"num_cpus": self._resources.num_cpus, "num_gpus": self._resources.num_gpus, "max_restarts": 0}
        actor_class = ray.remote(_SlotHost).options(**options)
        self._actors = [actor_class.remote(self._factory, list(block)) for block in self._blocks]

    def _split(self, slots: Sequence[int]) -> dict[int, list[int]]:
        """Actor -> its part of `slots`, actors in order."""
        parts: dict[int, list[int]] = {}
        for slot in slots:
            parts.setdefault(self._worker_of[slot], []).append(slot)
        return dict(sorted(parts.items()))

    def _call(self, method: str, arguments: Mapping[int, tuple[list[int], list[Any]]]) -> dict[int, Any]:
        import ray

        refs = {w: getattr(self._actors[w], method).remote(*args) for w, args in arguments.items()}
        _, pending = ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._timeout_s)
        results: dict[int, Any] = {}
        # Actors that have answered come first: a crash is a better message than the time-out it may have caused.
        for worker in sorted(refs, key=lambda w: refs[w] in pending):
            slots = arguments[worker][0]
            if refs[worker] in pending:
                raise EnvironmentFailure(self._late(worker, slots, method))
            try:
                results[worker] = ray.get(refs[worker])
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from None
                raise EnvironmentFailure(str(error.cause)) from error
            except ray.exceptions.RayActorError as error:
                raise EnvironmentFailure(
                    f"environment actor {worker} of {self.num_workers} died during {method} ({self._running(slots)}): "
                    f"{_first_and_last_line(error)}"
                ) from error
        return results

    def _running(self, slots: Sequence[int]) -> str:
        shown = ", ".join(f"slot {slot}: {_describe(self._tasks[slot])}" for slot in slots[:4])
        return shown + (f", and {len(slots) - 4} more" if len(slots) > 4 else "")

    def _late(self, worker: int, slots: Sequence[int], method: str) -> str:
        import ray

        wanted = self._resources.num_cpus * self.num_workers
        free = ray.available_resources().get("CPU", 0.0)
        return (
            f"environment actor {worker} of {self.num_workers} did not answer {method} within {self._timeout_s:g} s "
            f"({self._running(slots)}). Either an environment hangs, or Ray could not place the actors: they ask for "
            f"{wanted:g} CPUs in all (env.resources_per_worker, env.num_workers) and {free:g} are free now."
        )


def make_vector_env(
    factory: TextEnvFactory, num_slots: int, num_workers: int | None, resources: WorkerResources
) -> VectorEnv:
    """`env.num_workers`: null = actors by core count, 0 = in this process, n = n Ray actors."""
    if num_workers == 0:
        return LocalVectorEnv(factory, num_slots)
    return RayVectorEnv(factory, num_slots, num_workers, resources)
