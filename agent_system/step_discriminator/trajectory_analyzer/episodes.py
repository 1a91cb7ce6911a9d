# SPDX-License-Identifier: Apache-2.0
"""Playing one ALFWorld game to the end and writing the episode down, whoever chooses the actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_system.trajectory import SCHEMA_VERSION, Step, Trajectory

if TYPE_CHECKING:
    from agent_system.environments.env_package.alfworld import AlfworldGame

__all__ = ["ALFWORLD_ENV_NAME", "Choice", "EpisodeIdentity", "play_alfworld"]

ALFWORLD_ENV_NAME = "alfworld/AlfredTWEnv"


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
    gamefile: str
    """Relative to the data folder."""
    sha256: str
    task_type: str
    policy: Mapping[str, Any]


def play_alfworld(
    game: AlfworldGame,
    act: Callable[[str, dict[str, Any]], Choice | None],
    identity: EpisodeIdentity,
    max_steps: int,
) -> Trajectory:
    """Reset `game` and play until it is won, `act` returns None, or `max_steps` actions were taken."""
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
        env_name=ALFWORLD_ENV_NAME,
        task={
            "gamefile": identity.gamefile,
            "sha256": identity.sha256,
            "instruction": game.task,
            "task_type": identity.task_type,
        },
        policy=dict(identity.policy),
        success=bool(info["won"]),
        episode_reward=sum(step.reward for step in steps),
        task_score=float(info["won"]),
        truncated=not done and len(steps) >= max_steps,
        steps=tuple(steps),
        final_observation=observation,
    )
