# SPDX-License-Identifier: Apache-2.0
"""Independent jobs over Ray actors (or in this process), each job retried when its worker dies."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from verl.utils.errors import UserError

__all__ = ["WorkerLostError", "num_workers", "run_jobs"]

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerLostError(RuntimeError):
    """A job killed its worker every time it was tried."""


def num_workers(option: int) -> int:
    """The value of `--workers`: 0 is one worker per core this process may use.

    Raises:
        UserError: it is negative.
    """
    if option < 0:
        raise UserError(f"--workers {option}: give a number of workers, or 0 for one per core.")
    return option or len(os.sched_getaffinity(0))


def run_jobs(
    jobs: Sequence[Job],
    make_handler: Callable[[], Callable[[Job], Result]],
    *,
    workers: int = 1,
    retries: int = 3,
    describe: Callable[[Job], str] = str,
) -> Iterator[tuple[int, Result]]:
    """Yield (index of the job, result) in the order in which the jobs finish.

    Args:
        jobs: independent; the result of one may not depend on which worker does it, nor on when.
        make_handler: called once per worker, there; picklable when `workers` is above 1.
        workers: 1 runs the jobs here, in order, without Ray.
        retries: how often a job is given to a fresh worker after its worker died. An exception raised by the handler
            is no such death: it ends the iteration and is raised here.
        describe: names a job in messages.

    Raises:
        WorkerLostError: a job lost `retries` + 1 workers.
    """
    if workers <= 1 or len(jobs) <= 1:
        handler = make_handler()
        for index, job in enumerate(jobs):
            yield index, handler(job)
        return
    pool = _RayPool(jobs, make_handler, min(workers, len(jobs)), retries, describe)
    try:
        yield from pool.run()
    finally:
        pool.close()


class _JobActor(Generic[Job, Result]):
    """Runs inside a Ray worker process."""

    def __init__(self, make_handler: Callable[[], Callable[[Job], Result]]) -> None:
        self._handler = make_handler()

    def handle(self, job: Job) -> Result:
        return self._handler(job)


class _RayPool(Generic[Job, Result]):
    """One job in flight per actor: a death costs exactly that job's work."""

    def __init__(
        self,
        jobs: Sequence[Job],
        make_handler: Callable[[], Callable[[Job], Result]],
        workers: int,
        retries: int,
        describe: Callable[[Job], str],
    ) -> None:
        import ray

        self._ray = ray
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
        self._jobs = jobs
        self._describe = describe
        self._retries = retries
        self._make_handler = make_handler
        # Fractional, so that the pool also starts inside a cluster whose cores are all taken by a training run.
        self._actor_class = ray.remote(num_cpus=1 if self._owns_ray else 0.01)(_JobActor)
        self._actors = [self._new_actor() for _ in range(workers)]

    def _new_actor(self) -> Any:
        return self._actor_class.remote(self._make_handler)

    def run(self) -> Iterator[tuple[int, Result]]:
        waiting = deque(range(len(self._jobs)))
        lost = [0] * len(self._jobs)
        in_flight: dict[Any, tuple[int, int]] = {}
        idle = deque(range(len(self._actors)))
        while waiting or in_flight:
            while waiting and idle:
                slot, index = idle.popleft(), waiting.popleft()
                in_flight[self._actors[slot].handle.remote(self._jobs[index])] = (slot, index)
            ready, _ = self._ray.wait(list(in_flight), num_returns=1)
            slot, index = in_flight.pop(ready[0])
            try:
                result = self._ray.get(ready[0])
            except self._ray.exceptions.RayTaskError as error:
                # The handler's own exception, as it would be without workers.
                raise error.cause from error
            except self._ray.exceptions.RayActorError as error:
                lost[index] += 1
                name = self._describe(self._jobs[index])
                if lost[index] > self._retries:
                    raise WorkerLostError(f"{name}: {lost[index]} workers died on it, giving up.") from error
                logger.warning("%s: its worker died, trying again on a fresh one (%d)", name, lost[index])
                self._actors[slot] = self._new_actor()
                waiting.appendleft(index)
                idle.append(slot)
                continue
            idle.append(slot)
            yield index, result

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._owns_ray:
            self._ray.shutdown()
