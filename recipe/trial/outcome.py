# SPDX-License-Identifier: Apache-2.0
"""Outcome views: what each turn of a finished episode led to, as a text, taken from the record.

A view speaks of its own turn only: of what the environment answered to it and, at the last turn, of how the episode
ended. Wording of an environment is looked up by the record's `env_name`; what is not registered gets the general one.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_system.trajectory import Trajectory

__all__ = ["Wording", "outcome_views", "register_wording"]


@dataclass(frozen=True)
class Wording:
    """Sentences about the end of an episode; the rest of a view is the environment's own text.

    success, failure: the environment ended the episode with or without success. truncated: no turns were left.
    """

    success: str = "the task is solved"
    failure: str = "the task is not solved"
    truncated: str = "the task is not solved, and no turns are left"


_GENERAL = Wording()
_WORDINGS: dict[str, Wording] = {
    "webshop": Wording(
        success="the purchase is exactly what was asked for",
        failure="the purchase is not exactly what was asked for",
        truncated="nothing was bought, and no turns are left",
    ),
}


def register_wording(env_name: str, wording: Wording) -> None:
    """Set the wording for records of an environment (the part of `env_name` before the slash)."""
    _WORDINGS[env_name.lower()] = wording


def outcome_views(episode: Trajectory) -> list[str]:
    """One text per turn: the next observation; at the last turn how the episode ended, then the final observation.

    The end comes first, because a view that is too long loses its own end.
    """
    seen = [step.observation for step in episode.steps[1:]]
    ending = _ending(episode)
    return [*map(_view, seen), f"\n\nThis turn leads to: {ending}.\n{episode.final_observation}"]


def _view(observation: str) -> str:
    return f"\n\nThis turn leads to:\n{observation}"


def _ending(episode: Trajectory) -> str:
    wording = _WORDINGS.get(episode.env_name.split("/", 1)[0].lower(), _GENERAL)
    if episode.success:
        return wording.success
    if episode.truncated:
        return wording.truncated
    score = "" if episode.task_score is None else f" (score {episode.task_score:.2f} of 1)"
    return wording.failure + score
