# SPDX-License-Identifier: Apache-2.0
"""Environment slots in Ray actors: dead actors are replaced and their episodes replayed, hung ones are reported."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_system.environments.vector_env import (
    DEFAULT_TIMEOUT_S,
    EnvironmentFailure,
    Info,
    SlotHost,
    StepResult,
    Task,
    TextEnvFactory,
    VectorEnv,
    WorkerResources,
    describe_task,
)
from verl.utils.errors import UserError

__all__ = ["RayVectorEnv", "default_num_workers"]

logger = logging.getLogger(__name__)

# One call may lose its actor so often; an environment that kills its process every time must end the run.
_MAX_DEATHS_PER_CALL = 3
_WATCH = "watch"
_WATCH_TIMEOUT_S = 5.0


def default_num_workers(num_slots: int) -> int:
    """Environment actors for `num_slots` slots: 16 slots an actor, at most one actor per core this process may use."""
    return max(1, min(len(os.sched_getaffinity(0)), math.ceil(num_slots / 16)))


def _first_and_last_line(error: Exception) -> str:
    """Ray's message in short: what happened and, when a traceback follows, its last line; without colours."""
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1].strip()])) if lines else type(error).__name__


@dataclass
class _Episode:
    """What it takes to bring a slot back to where it is, and to notice when that failed."""

    task: Task
    actions: list[str] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    """(observation, state key) of the reset and of every action."""


class _ActorDied(Exception):
    """Internal: the actor of one call is gone."""

    def __init__(self, error: Exception) -> None:
        super().__init__(_first_and_last_line(error))


class RayVectorEnv(VectorEnv):
    """Slots spread in equal, contiguous blocks over `num_workers` Ray actors (so that most groups lie in one actor and
    share its loaded game). One remote call per actor and turn. Actors start with the first reset.

    An actor that dies (killed, out of memory, node lost) is replaced; its episodes are started again, the recorded
    actions played, and every observation and state key compared with what was seen before. Environments are
    deterministic, so a difference is an error. An actor that does not answer in time is killed and reported.
    """

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
            timeout_s: how long one reset, step or replay of an actor may take, in seconds.
        """
        if num_slots < 1 or (num_workers is not None and num_workers < 1):
            raise ValueError(f"num_slots={num_slots} and num_workers={num_workers} must be at least 1")
        self.num_slots = num_slots
        self.num_workers = min(num_workers or default_num_workers(num_slots), num_slots)
        self.num_replaced = 0
        """Actors that died and were replaced so far."""
        self._factory = factory
        self._resources = resources or WorkerResources()
        self._timeout_s = timeout_s
        bounds = [num_slots * i // self.num_workers for i in range(self.num_workers + 1)]
        self._blocks = [range(bounds[i], bounds[i + 1]) for i in range(self.num_workers)]
        self._worker_of = [worker for worker, block in enumerate(self._blocks) for _ in block]
        self._actors: list[Any] = []
        self._tasks: list[Task] = []
        self._episodes: dict[int, _Episode] = {}

    # ---- the interface

    def reset(self, tasks: Sequence[Task]) -> tuple[list[str], list[Info]]:
        self._check_tasks(tasks)
        self._start()
        self._tasks = list(tasks)
        self._episodes = {}
        parts = self._split(range(len(tasks)))
        results = self._call("reset", {w: (slots, [tasks[s] for s in slots]) for w, slots in parts.items()})
        # Blocks are contiguous and in order, so concatenation restores the slot order.
        observations: list[str] = [obs for w in parts for obs in results[w][0]]
        infos: list[Info] = [info for w in parts for info in results[w][1]]
        for slot, task in enumerate(tasks):
            self._episodes[slot] = _Episode(task, [], [(observations[slot], infos[slot]["state_key"])])
        return observations, infos

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> StepResult:
        self._check_step(slots, actions, len(self._episodes))
        action_of = dict(zip(slots, actions))
        parts = self._split(slots)
        results = self._call("step", {w: (mine, [action_of[s] for s in mine]) for w, mine in parts.items()})
        row_of = {slot: (w, i) for w, mine in parts.items() for i, slot in enumerate(mine)}
        where = [row_of[slot] for slot in slots]
        observations, rewards, dones, infos = ([results[w][column][i] for w, i in where] for column in range(4))
        for row, slot in enumerate(slots):
            self._episodes[slot].actions.append(actions[row])
            self._episodes[slot].turns.append((observations[row], infos[row]["state_key"]))
        return observations, rewards, dones, infos

    def close(self) -> None:
        for worker in range(len(self._actors)):
            self._kill(worker)
        self._actors = []
        self._tasks = []
        self._episodes = {}

    # ---- actors

    def _start(self) -> None:
        if self._actors:
            return
        import ray

        if not ray.is_initialized():
            raise RuntimeError("RayVectorEnv needs a running Ray; call ray.init() first or use LocalVectorEnv")
        self._actors = [self._new_actor(worker) for worker in range(self.num_workers)]

    def _new_actor(self, worker: int) -> Any:
        import ray

        # A second thread of the actor answers what it is doing while the first one is stuck.
        options: dict[str, Any] = {
            "num_cpus": self._resources.num_cpus,
            "num_gpus": self._resources.num_gpus,
            "max_restarts": 0,
            "concurrency_groups": {_WATCH: 1},
        }
        actor_class: Any = ray.remote(**options)(SlotHost)
        return actor_class.remote(self._factory, list(self._blocks[worker]))

    def _kill(self, worker: int) -> None:
        import ray

        ray.kill(self._actors[worker])

    def _split(self, slots: Sequence[int]) -> dict[int, list[int]]:
        """Actor -> its part of `slots`, actors in order."""
        parts: dict[int, list[int]] = {}
        for slot in slots:
            parts.setdefault(self._worker_of[slot], []).append(slot)
        return dict(sorted(parts.items()))

    # ---- calls

    def _call(self, method: str, arguments: Mapping[int, tuple[list[int], list[Any]]]) -> dict[int, Any]:
        """Results by actor; actors that die are replaced and asked again."""
        results: dict[int, Any] = {}
        deaths = dict.fromkeys(arguments, 0)
        waiting = list(arguments)
        while waiting:
            answers = self._ask(method, {worker: arguments[worker] for worker in waiting})
            waiting = [worker for worker, answer in answers.items() if isinstance(answer, _ActorDied)]
            results.update({worker: answer for worker, answer in answers.items() if worker not in waiting})
            for worker in waiting:
                self._recover(worker, method, arguments[worker][0], answers[worker], deaths)
        return results

    def _recover(self, worker: int, method: str, slots: list[int], death: _ActorDied, deaths: dict[int, int]) -> None:
        """Replace a dead actor and bring its episodes back to where they were; again when it dies of the replay.

        Raises:
            EnvironmentFailure: it died too often during this call, or the replay shows something else than before.
        """
        while True:
            deaths[worker] += 1
            if deaths[worker] == _MAX_DEATHS_PER_CALL:
                raise EnvironmentFailure(
                    f"environment actor {worker} of {self.num_workers} died during {method} ({self._shown(slots)}), "
                    f"{_MAX_DEATHS_PER_CALL} times in a row: {death}"
                )
            logger.warning(
                "environment actor %d of %d died during %s (%s): %s; replacing it",
                worker, self.num_workers, method, self._shown(slots), death,
            )  # fmt: skip
            self._actors[worker] = self._new_actor(worker)
            self.num_replaced += 1
            mine = [slot for slot in self._blocks[worker] if slot in self._episodes]
            if not mine:
                return
            episodes = [self._episodes[slot] for slot in mine]
            tasks, actions = [episode.task for episode in episodes], [episode.actions for episode in episodes]
            answer = self._ask("replay", {worker: (mine, tasks, actions)})[worker]
            if not isinstance(answer, _ActorDied):
                self._verify(mine, answer)
                return
            death = answer

    def _verify(self, slots: list[int], replayed: list[list[tuple[str, str]]]) -> None:
        for slot, turns in zip(slots, replayed):
            episode = self._episodes[slot]
            for number, (expected, found) in enumerate(zip(episode.turns, turns, strict=True)):
                if expected != found:
                    after = f"action {number} ({episode.actions[number - 1][:80]!r})" if number else "the reset"
                    raise EnvironmentFailure(
                        f"environment slot {slot}, task {describe_task(episode.task)}: after its actor died, the "
                        f"replay of the recorded actions differs at {after}: {found[0][:120]!r} instead of "
                        f"{expected[0][:120]!r}. The environment is not deterministic."
                    )

    def _ask(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """One call to several actors at once; the answer of one that died is an `_ActorDied`.

        Raises:
            EnvironmentFailure: an environment raised, or an actor did not answer in time.
            UserError: raised by an environment.
        """
        import ray

        refs = {w: getattr(self._actors[w], method).remote(*args) for w, args in arguments.items()}
        _, pending = ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._timeout_s)
        answers: dict[int, Any] = {}
        # Actors that have answered come first: a crash is a better message than the time-out it may have caused.
        for worker in sorted(refs, key=lambda w: refs[w] in pending):
            if refs[worker] in pending:
                message = self._late(worker, arguments[worker][0], method)
                self._kill(worker)
                raise EnvironmentFailure(message)
            try:
                answers[worker] = ray.get(refs[worker])
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from None
                raise EnvironmentFailure(str(error.cause)) from error
            except ray.exceptions.RayActorError as error:
                answers[worker] = _ActorDied(error)
        return dict(sorted(answers.items()))

    # ---- messages

    def _shown(self, slots: list[int]) -> str:
        shown = ", ".join(f"slot {slot}: {describe_task(self._tasks[slot])}" for slot in slots[:4])
        return shown + (f", and {len(slots) - 4} more" if len(slots) > 4 else "")

    def _late(self, worker: int, slots: list[int], method: str) -> str:
        """Which environment hangs and where; when the actor cannot say, all it was asked about."""
        import ray

        head = f"environment actor {worker} of {self.num_workers} did not answer {method} within {self._timeout_s:g} s"
        try:
            probe = self._actors[worker].running.options(concurrency_group=_WATCH).remote()
            running = ray.get(probe, timeout=min(self._timeout_s, _WATCH_TIMEOUT_S))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            running = None
        if running is not None:
            slot, call, seconds = running
            return (
                f"{head}: slot {slot}, task {describe_task(self._tasks[slot])}, has been in {call} for {seconds:.0f} "
                "s. Raise env.worker_timeout if that may take so long."
            )
        wanted = self._resources.num_cpus * self.num_workers
        free = ray.available_resources().get("CPU", 0.0)
        return (
            f"{head} ({self._shown(slots)}). Either an environment hangs, or Ray could not place the actors: they ask "
            f"for {wanted:g} CPUs in all (env.resources_per_worker, env.num_workers) and {free:g} are free now."
        )
