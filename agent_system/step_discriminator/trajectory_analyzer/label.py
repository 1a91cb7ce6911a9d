# SPDX-License-Identifier: Apache-2.0
"""Credit labels for trajectories, in process: what stage 1 fans out and what the RL recipe calls directly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_system.step_discriminator.trajectory_analyzer.records import CreditOptions, CreditRecord, StepCredit
from agent_system.step_discriminator.trajectory_analyzer.replay import (
    Ablation,
    OriginalRun,
    ReplayableGame,
    Replayer,
    SuccessTest,
    reported_won,
)
from agent_system.trajectory import Trajectory
from verl.utils.errors import UserError

__all__ = ["EnvFactory", "RevealTest", "TrajectoryJob", "label_job", "label_trajectories", "revealing_steps"]

logger = logging.getLogger(__name__)

EnvFactory = Callable[[Mapping[str, Any]], ReplayableGame]
"""The `task` of a trajectory -> a game of that task; raises UserError or OSError when it cannot be built."""

RevealTest = Callable[[str, str], str | None]
"""(action, the environment's answer) -> a name for the place or page it showed, or None."""


@dataclass(frozen=True)
class TrajectoryJob:
    """The part of a trajectory that replaying needs; small enough to be sent to a worker."""

    traj_uid: str
    task: Mapping[str, Any]
    success: bool
    actions: tuple[str, ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryJob:
        return cls(
            traj_uid=trajectory.traj_uid,
            task=trajectory.task,
            success=trajectory.success,
            actions=tuple(step.action for step in trajectory.steps),
        )


def label_trajectories(
    trajectories: Sequence[Trajectory],
    env_factory: EnvFactory,
    *,
    options: CreditOptions | None = None,
    reveals: RevealTest | None = None,
    is_success: SuccessTest = reported_won,
) -> list[CreditRecord]:
    """Label `trajectories` by replay, one after the other in this process.

    Args:
        trajectories: any mixture of tasks.
        env_factory: builds the game of a task.
        options: defaults to single-step ablation without the search for an evolved trajectory.
        reveals: tells which steps showed a new place or page; without it no step is of the kind `exploration`.
        is_success: when an environment step counts as success.

    Returns:
        One record per trajectory, in the same order. A failed, not reproducible or unreadable one has a status and a
        reason instead of labels; it is never dropped.
    """
    chosen = CreditOptions(evolve=False) if options is None else options
    return [
        label_job(TrajectoryJob.of(item), env_factory, chosen, reveals=reveals, is_success=is_success)
        for item in trajectories
    ]


def label_job(
    job: TrajectoryJob,
    env_factory: EnvFactory,
    options: CreditOptions,
    *,
    reveals: RevealTest | None = None,
    is_success: SuccessTest = reported_won,
) -> CreditRecord:
    """Label one trajectory. A game that cannot be built becomes the status `unreadable_game` with the error's text."""
    if not job.success and not options.label_failed:
        return CreditRecord(job.traj_uid, "failed", label_source=options.label_source)
    try:
        game = env_factory(job.task)
    except (UserError, OSError) as error:
        return CreditRecord(job.traj_uid, "unreadable_game", reason=str(error), label_source=options.label_source)
    replayer = Replayer(game, job.actions, is_success)
    original = replayer.original
    if original.success != job.success:
        replayed = "succeeded" if original.success else "did not succeed"
        recorded = "a success" if job.success else "a failure"
        reason = f"recorded as {recorded}, but its replay of {len(original.actions)} actions {replayed}"
        return _with_counts(CreditRecord(job.traj_uid, "not_reproducible", reason=reason), replayer, options)
    steps = _label_steps(replayer, reveals)
    evolved = _evolve(replayer, steps) if options.evolve and original.success else None
    return _with_counts(CreditRecord(job.traj_uid, "labelled", steps=steps, evolved_indices=evolved), replayer, options)


def _with_counts(record: CreditRecord, replayer: Replayer, options: CreditOptions) -> CreditRecord:
    return replace(
        record,
        replays=replayer.replays,
        env_steps_used=replayer.env_steps_used,
        env_steps_naive=replayer.env_steps_naive,
        label_source=options.label_source,
    )


def _label_steps(replayer: Replayer, reveals: RevealTest | None) -> tuple[StepCredit, ...]:
    original = replayer.original
    revealing = revealing_steps(original.actions, original.observations, original.keys, reveals)
    steps = []
    for index in range(len(original.actions)):
        ablation = replayer.without(index)
        steps.append(
            StepCredit(
                step_index=index,
                credit=0 if ablation.success else 1,
                ablated_success=ablation.success,
                ablated_steps=ablation.steps,
                necessary_single=not ablation.success,
                redundancy_kind=_kind(original, index, ablation, index in revealing) if ablation.success else None,
            )
        )
    return tuple(steps)


def revealing_steps(
    actions: Sequence[str], observations: Sequence[str], keys: Sequence[str], reveals: RevealTest | None
) -> set[int]:
    """Indices of the steps that changed the state and showed a place or page for the first time in this run.

    Args:
        actions: T actions.
        observations, keys: what was seen and the state key before every action and after the last, T + 1 each.
        reveals: None = nothing counts as revealing.
    """
    if reveals is None:
        return set()
    seen: set[str] = set()
    found: set[int] = set()
    for index, action in enumerate(actions):
        name = reveals(action, observations[index + 1])
        if name is None or name in seen:
            continue
        seen.add(name)
        if keys[index] != keys[index + 1]:
            found.add(index)
    return found


def _kind(original: OriginalRun, index: int, ablation: Ablation, revealing: bool) -> str:
    """Kind of a redundant step; the first that fits.

    exploration: it showed something not seen before. no_effect: the state did not change. undone: without it the run
    comes back to the original's states, so the later steps had reversed (or overwritten) what it did. other: what it
    did stayed, and did not matter.
    """
    if revealing:
        return "exploration"
    if original.keys[index] == original.keys[index + 1]:
        return "no_effect"
    return "undone" if ablation.rejoins else "other"


def _evolve(replayer: Replayer, steps: tuple[StepCredit, ...]) -> tuple[int, ...]:
    """Indices of a verified success without redundant steps.

    First all redundant steps at once; single-step labels are not jointly safe, so when that fails they go one at a
    time, last first, each deletion verified together with those before it.
    """
    wanted = [step.step_index for step in steps if step.credit == 0]
    kept = [step.step_index for step in steps]
    if not wanted:
        return tuple(kept)
    together = [index for index in kept if steps[index].credit == 1]
    outcome = replayer.keep(together)
    if outcome.success:
        return tuple(together[: outcome.steps])
    for index in reversed(wanted):
        if index not in kept:
            continue
        shorter = [other for other in kept if other != index]
        outcome = replayer.keep(shorter)
        if outcome.success:
            kept = shorter[: outcome.steps]
    return tuple(kept)
