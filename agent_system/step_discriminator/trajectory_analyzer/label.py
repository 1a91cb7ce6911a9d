# SPDX-License-Identifier: Apache-2.0
"""Credit labels for trajectories, in process: what stage 1 fans out and what the RL recipe calls directly."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_system.step_discriminator.trajectory_analyzer.adapters import EnvAdapter, RevealTest
from agent_system.step_discriminator.trajectory_analyzer.minimal import Evolved, evolve
from agent_system.step_discriminator.trajectory_analyzer.records import CreditOptions, CreditRecord, StepCredit
from agent_system.step_discriminator.trajectory_analyzer.replay import Ablation, OriginalRun, Replayer
from agent_system.trajectory import Trajectory
from verl.utils.errors import UserError

__all__ = ["TrajectoryJob", "label_job", "label_trajectories", "revealing_steps"]


@dataclass(frozen=True)
class TrajectoryJob:
    """The part of a trajectory that replaying needs; small enough to be sent to a worker."""

    traj_uid: str
    task: Mapping[str, Any]
    success: bool
    task_score: float | None
    """As recorded, in [0, 1]."""
    actions: tuple[str, ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryJob:
        return cls(
            traj_uid=trajectory.traj_uid,
            task=trajectory.task,
            success=trajectory.success,
            task_score=trajectory.task_score,
            actions=tuple(step.action for step in trajectory.steps),
        )

    def reached(self, threshold: float) -> bool:
        """Whether the record counts as a success."""
        return self.success or (self.task_score is not None and self.task_score >= threshold)


def label_trajectories(
    trajectories: Sequence[Trajectory], adapter: EnvAdapter, *, options: CreditOptions | None = None
) -> list[CreditRecord]:
    """Label `trajectories` by replay, one after the other in this process.

    Args:
        trajectories: any mixture of tasks of one environment.
        adapter: of that environment.
        options: defaults to single-step ablation without the search for an evolved trajectory.

    Returns:
        One record per trajectory, in the same order. A failed, not reproducible or unreadable one has a status and a
        reason instead of labels; it is never dropped.
    """
    chosen = CreditOptions(evolve=False) if options is None else options
    return [label_job(TrajectoryJob.of(item), adapter, chosen) for item in trajectories]


def label_job(job: TrajectoryJob, adapter: EnvAdapter, options: CreditOptions) -> CreditRecord:
    """Label one trajectory. A game that cannot be built becomes the status `unreadable_game` with the error's text."""
    blank = CreditRecord(job.traj_uid, "failed", label_source=options.label_source)
    recorded = job.reached(options.success_threshold)
    if not recorded and not options.label_failed:
        return blank
    try:
        game = adapter.make_game(job.task)
    except (UserError, OSError) as error:
        return replace(blank, status="unreadable_game", reason=str(error))
    replayer = Replayer(game, job.actions, adapter.score, options.success_threshold, adapter.state_id)
    original = replayer.original
    blank = replace(blank, succeeded=original.success, final_score=original.score)
    if original.success != recorded:
        said, did = ("a success", "did not succeed") if recorded else ("a failure", "succeeded")
        reason = f"recorded as {said}, but its replay of {len(original.actions)} actions {did}"
        return _with_counts(replace(blank, status="not_reproducible", reason=reason), replayer)
    ablations = [replayer.without((index,)) for index in range(len(original.actions))]
    evolved = None
    if options.evolve and original.success:
        evolved = evolve(replayer, joint=options.mode == "minimal")
    steps = _label_steps(original, ablations, evolved, adapter.reveals, options)
    kept = None if evolved is None else evolved.indices
    return _with_counts(replace(blank, status="labelled", steps=steps, evolved_indices=kept), replayer)


def _with_counts(record: CreditRecord, replayer: Replayer) -> CreditRecord:
    return replace(
        record,
        replays=replayer.replays,
        env_steps_used=replayer.env_steps_used,
        env_steps_naive=replayer.env_steps_naive,
    )


def _label_steps(
    original: OriginalRun,
    ablations: Sequence[Ablation],
    evolved: Evolved | None,
    reveals: RevealTest | None,
    options: CreditOptions,
) -> tuple[StepCredit, ...]:
    revealing = revealing_steps(original.actions, original.observations, original.states, reveals)
    kept = set(evolved.indices) if evolved is not None and options.mode == "minimal" else None
    steps = []
    for index, ablation in enumerate(ablations):
        in_minimal = None if kept is None else index in kept
        # A failed trajectory has no minimal success; its steps keep the single label.
        chosen = in_minimal if options.label_source == "minimal" else None
        necessary = not ablation.success if chosen is None else chosen
        undone = ablation.rejoins if ablation.success else evolved is not None and index in evolved.undone
        steps.append(
            StepCredit(
                step_index=index,
                credit=int(necessary),
                ablated_success=ablation.success,
                ablated_steps=ablation.steps,
                necessary_single=not ablation.success,
                in_minimal=in_minimal,
                redundancy_kind=None if necessary else _kind(original, index, index in revealing, undone),
            )
        )
    return tuple(steps)


def revealing_steps(
    actions: Sequence[str], observations: Sequence[str], states: Sequence[Hashable], reveals: RevealTest | None
) -> set[int]:
    """Indices of the steps that changed the state and showed a place or page for the first time in this run.

    Args:
        actions: T actions.
        observations, states: what was seen and a name of the state before every action and after the last, T + 1 each.
        reveals: None = nothing counts as revealing.
    """
    if reveals is None:
        return set()
    seen = {reveals("", observations[0])}
    found: set[int] = set()
    for index, action in enumerate(actions):
        name = reveals(action, observations[index + 1])
        if name is None or name in seen:
            continue
        seen.add(name)
        if states[index] != states[index + 1]:
            found.add(index)
    return found


def _kind(original: OriginalRun, index: int, revealing: bool, undone: bool) -> str:
    """Kind of a redundant step; the first that fits.

    exploration: it showed something not seen before. no_effect: the state did not change. undone: without it (or
    without it and the steps that were removed together with it) the run comes back to the states it had, so later
    steps had reversed or overwritten what it did. other: what it did stayed, and did not matter.
    """
    if revealing:
        return "exploration"
    if original.states[index] == original.states[index + 1]:
        return "no_effect"
    return "undone" if undone else "other"
