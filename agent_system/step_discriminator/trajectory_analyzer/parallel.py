# SPDX-License-Identifier: Apache-2.0
"""Independent jobs over Ray actors (or in this process), each job retried when its worker dies."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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


_CALL_SECONDS = 0.1
"""Short jobs travel together, so that sending them costs little beside them: as many as take about this long."""


class _JobActor(Generic[Job, Result]):
    """Runs inside a Ray worker process. What it finished of a call is also on disk, where it outlives the process."""

    def __init__(self, make_handler: Callable[[], Callable[[Job], Result]], log: Path) -> None:
        self._handler = make_handler()
        self._log = log

    def handle(self, jobs: Sequence[tuple[int, Job]]) -> tuple[list[Result], float]:
        """Results of numbered jobs in order, and the seconds it took."""
        started = time.monotonic()
        results: list[Result] = []
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb", buffering=0) as log:
            for index, job in jobs:
                results.append(self._handler(job))
                if len(jobs) > 1:
                    log.write(pickle.dumps((index, results[-1])))
        return results, time.monotonic() - started


@dataclass
class _Worker:
    """An actor, the file of its finished results, and the jobs it is working on."""

    actor: Any
    log: Path
    given: list[int]


class _RayPool(Generic[Job, Result]):
    """One call in flight per actor; a death costs the job that was being done."""

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
        self._scratch = Path(tempfile.mkdtemp(prefix="jobs-"))
        self._waiting = deque(range(len(jobs)))
        self._lost = [0] * len(jobs)
        self._seconds_per_job: float | None = None
        self._workers = [self._new_worker(slot) for slot in range(workers)]

    def _new_worker(self, slot: int) -> _Worker:
        log = self._scratch / str(slot)
        return _Worker(self._actor_class.remote(self._make_handler, log), log, [])

    def run(self) -> Iterator[tuple[int, Result]]:
        in_flight = {self._give(worker): slot for slot, worker in enumerate(self._workers)}
        while in_flight:
            ready, _ = self._ray.wait(list(in_flight), num_returns=1)
            slot = in_flight.pop(ready[0])
            worker = self._workers[slot]
            results, died = self._collect(worker, ready[0])
            done, rest = worker.given[: len(results)], worker.given[len(results) :]
            if died is not None:
                yield from zip(done, results)
                done = []
                self._note_death(rest[0], died)
                self._waiting.extendleft(reversed(rest))
                self._workers[slot] = worker = self._new_worker(slot)
            if self._waiting:
                in_flight[self._give(worker)] = slot
            yield from zip(done, results)

    def _give(self, worker: _Worker) -> Any:
        """Send an idle worker its next jobs: few enough that none is left to itself in the end."""
        size = 1
        if self._seconds_per_job is not None:
            share = len(self._waiting) // (2 * len(self._workers))
            size = max(1, min(int(_CALL_SECONDS / max(self._seconds_per_job, 1e-6)), share))
        worker.given = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        return worker.actor.handle.remote([(index, self._jobs[index]) for index in worker.given])

    def _collect(self, worker: _Worker, answer: Any) -> tuple[list[Result], Exception | None]:
        """(results of the first jobs given, why the worker died before the rest)."""
        try:
            results, seconds = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            # The handler's own exception, as it would be without workers.
            raise error.cause from error
        except self._ray.exceptions.RayActorError as error:
            # Never all of them: a worker that finished its last job may have died before it could say so.
            return _read_log(worker.log, worker.given[:-1]), error
        self._seconds_per_job = seconds / len(results)
        return results, None

    def _note_death(self, index: int, error: Exception) -> None:
        self._lost[index] += 1
        name = self._describe(self._jobs[index])
        if self._lost[index] > self._retries:
            raise WorkerLostError(f"{name}: {self._lost[index]} workers died on it, giving up.") from error
        logger.warning("%s: its worker died, trying again on a fresh one (%d)", name, self._lost[index])

    def close(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker.actor)
        if self._owns_ray:
            self._ray.shutdown()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _read_log(path: Path, given: Sequence[int]) -> list[Any]:
    """Results of the first of the jobs `given` that a dead worker had finished; none when it ran on another machine.

    Whatever else the file holds is of an earlier call.
    """
    results: list[Any] = []
    if not path.is_file():
        return results
    with path.open("rb") as log:
        for index in given:
            try:
                finished, result = pickle.load(log)
            except (EOFError, pickle.UnpicklingError):
                # The end, or a result that was being written.
                break
            if finished != index:
                break
            results.append(result)
    return results
