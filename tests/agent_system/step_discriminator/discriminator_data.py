# SPDX-License-Identifier: Apache-2.0
"""Small labelled episodes and credit files for the tests of stage 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent_system.step_discriminator.trajectory_analyzer.document import build_document, dump_document
from agent_system.step_discriminator.trajectory_analyzer.records import CreditOptions, CreditRecord, StepCredit
from agent_system.trajectory import Step, Trajectory

TEXTS = (
    *("necessary", "redundant") * 6,
    "Below is a finished episode. Judge one of its steps: redundant if the task would still have been solved",
    "without it, else necessary. Task: put an apple in the fridge. go to cabinet 1. look around. take apple 1.",
)


def make_trajectory(
    actions: Sequence[str],
    *,
    uid: str = "t0",
    task: str = "g0",
    source: str = "expert",
    success: bool = True,
    observations: Sequence[str] | None = None,
) -> Trajectory:
    """An episode with one made-up observation per action and a last one."""
    seen = list(observations) if observations else [f"You see thing {i}." for i in range(len(actions) + 1)]
    steps = tuple(
        Step(
            step_index=i,
            observation=seen[i],
            admissible_actions=("look", "inventory"),
            response=None,
            action=action,
            is_action_valid=True,
            reward=10.0 if success and i == len(actions) - 1 else 0.0,
            done=i == len(actions) - 1,
            state_key=f"{uid}-{i}",
            expert_kind="plan",
        )
        for i, action in enumerate(actions)
    )
    return Trajectory(
        schema_version=1,
        traj_uid=uid,
        uid="u",
        env_name="alfworld/AlfredTWEnv",
        task={
            "gamefile": f"{task}.tw-pddl",
            "sha256": task,
            "instruction": "put an apple in the fridge.",
            "task_type": "pick",
        },
        policy={"kind": source},
        success=success,
        episode_reward=10.0 if success else 0.0,
        task_score=None,
        truncated=False,
        steps=steps,
        final_observation=seen[len(actions)],
    )


def write_credit(path: Path, trajectories: Sequence[Trajectory], credits: Sequence[Sequence[int]]) -> Path:
    """A `credit_analysis.json` made with stage 1's own writer."""
    records = [
        CreditRecord(
            trajectory.traj_uid,
            "labelled",
            succeeded=trajectory.success,
            steps=tuple(
                StepCredit(i, credit, credit == 0, 1, credit == 1, None, None if credit else "other")
                for i, credit in enumerate(row)
            ),
            evolved_indices=tuple(i for i, credit in enumerate(row) if credit),
        )
        for trajectory, row in zip(trajectories, credits)
    ]
    document = build_document(
        trajectories, records, CreditOptions(), versions={}, bad_records=[], timing_file="timing.json"
    )
    path.write_text(dump_document(document))
    return path


def learnable_episodes(num_tasks: int, seed: int = 0) -> tuple[list[Trajectory], list[list[int]]]:
    """Two episodes a task in which exactly the steps with the action `look around` are redundant."""
    rng = np.random.default_rng(seed)
    trajectories, credits = [], []
    for number in range(num_tasks * 2):
        actions = [str(a) for a in rng.choice(["look around", "go to cabinet 1", "take apple 1"], rng.integers(3, 7))]
        actions.append("put apple 1")
        source = "expert" if number % 2 == 0 else "model"
        trajectories.append(make_trajectory(actions, uid=f"t{number}", task=f"g{number // 2}", source=source))
        credits.append([0 if action == "look around" else 1 for action in actions])
    return trajectories, credits
