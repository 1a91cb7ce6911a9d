# SPDX-License-Identifier: Apache-2.0
"""Playing one task to the end and writing the episode down, whoever chooses the actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_system.step_discriminator.trajectory_analyzer.adapters import ReplayableGame
from agent_system.trajectory import SCHEMA_VERSION, Step, Trajectory

__all__ = ["Choice", "EpisodeIdentity", "play"]


@dataclass(frozen=True)
class Choice:
    """One action and where it came from."""

    action: str
    response: str | None = None
    expert_kind: str | None = None
    is_valid: bool = True


@dataclass(frozen=True)
class EpisodeIdentity:
    """The part of a record that is known before the first action."""

    traj_uid: str
    uid: str
    env_name: str
    task: Mapping[str, Any]
    """What rebuilds the game, with `instruction` and `task_type`."""
    policy: Mapping[str, Any]


def play(
    game: ReplayableGame,
    act: Callable[[str, Mapping[str, Any]], Choice | None],
    identity: EpisodeIdentity,
    max_steps: int,
) -> Trajectory:
    """Reset `game` and play until it ends, `act` returns None, or `max_steps` actions were taken.

    Infos of the game hold `won`, `admissible_commands` and, where it has scores between 0 and 1, `task_score`.
    """
    observation, info = game.reset()
    steps: list[Step] = []
    done = False
    while not done and len(steps) < max_steps:
        choice = act(observation, info)
        if choice is None:
            break
        seen, admissible, key = observation, tuple(info["admissible_commands"]), game.state_key
        observation, reward, done, info = game.step(choice.action)
        steps.append(
            Step(
                step_index=len(steps),
                observation=seen,
                admissible_actions=admissible,
                response=choice.response,
                action=choice.action,
                is_action_valid=choice.is_valid,
                reward=reward,
                done=done,
                state_key=key,
                expert_kind=choice.expert_kind,
            )
        )
    return Trajectory(
        schema_version=SCHEMA_VERSION,
        traj_uid=identity.traj_uid,
        uid=identity.uid,
        env_name=identity.env_name,
        task=dict(identity.task),
        policy=dict(identity.policy),
        success=bool(info["won"]),
        episode_reward=sum(step.reward for step in steps),
        task_score=float(info.get("task_score", info["won"])),
        truncated=not done and len(steps) >= max_steps,
        steps=tuple(steps),
        final_observation=observation,
    )
