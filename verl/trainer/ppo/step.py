# SPDX-License-Identifier: Apache-2.0
"""One training step: what its phases are, what they hand to each other, and what the trainer needs of its surroundings.

The protocols name what the trainer uses of the agent loop, which it does not import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.protocol import DataProto

__all__ = [
    "Collector",
    "EpisodeWriter",
    "Phase",
    "RewardFn",
    "RolloutResult",
    "StepState",
    "ValidationResult",
    "Validator",
]


class RolloutResult(Protocol):
    """One rollout: rows (one a turn), whole episodes, scalars to log."""

    @property
    def batch(self) -> DataProto: ...
    @property
    def episodes(self) -> Sequence[Any]: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...


class Collector(Protocol):
    """Plays episodes with the rollout engine (``agent_system.multi_turn_rollout.TrajectoryCollector``)."""

    def multi_turn_loop(
        self, envs: Any, actor_rollout_wg: Any, *, step: int, num_tasks: int, group_size: int, generation: int = 0
    ) -> RolloutResult:
        """Play one generation batch; batches of one step that differ in ``generation`` share no uid and no seed."""

    def merge(self, parts: Sequence[Any], uids: Collection[str]) -> RolloutResult:
        """The groups ``uids`` of several generation batches as one rollout; metrics are over all that was played."""


class ValidationResult(Protocol):
    """Scalars named ``val/...``; the validator has written its own result files."""

    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def samples(self) -> Sequence[tuple[str, str, float]]:
        """Input text, output text and score of every episode."""


class Validator(Protocol):
    """Plays the validation panel (``agent_system.multi_turn_rollout.validation.Validator``)."""

    def validate(self, envs: Any, actor_rollout_wg: Any, *, step: int) -> ValidationResult: ...


RewardFn = Callable[..., Any]
EpisodeWriter = Callable[[Path, Sequence[Any]], None]


@dataclass
class StepState:
    """What the phases of one step hand to each other.

    ``batch`` holds real rows only, in rollout order; ``update_rows`` are the rows that the updates see: resampled where
    asked for, filled up to the number of ranks and balanced over them.
    """

    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    episodes: Sequence[Any] = ()
    rollout: DataProto | None = None
    update_rows: DataProto | None = None
    generations: Sequence[tuple[str, str, float]] = ()
    """Episodes of a validation that the trackers show."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def batch(self) -> DataProto:
        if self.rollout is None:
            raise RuntimeError("the rollout phase has not run yet")
        return self.rollout

    @property
    def rows_to_learn(self) -> DataProto:
        if self.update_rows is None:
            raise RuntimeError("the phase that prepares the update has not run yet")
        return self.update_rows

    def take(self, result: RolloutResult) -> None:
        """Go on with this rollout's rows and episodes."""
        self.rollout, self.episodes = result.batch, result.episodes

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the block's wall time to ``timing_s/{name}``."""
        with _timer(name, self.timing):
            yield


@contextmanager
def _timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Phase:
    """A named part of the step. ``timed`` phases show up as ``timing_s/{name}``."""

    name: str
    run: Callable[[StepState], None]
    when: Callable[[int], bool]
    timed: bool = True
