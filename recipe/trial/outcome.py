# SPDX-License-Identifier: Apache-2.0
"""Outcome views: what each turn of a finished episode led to, as a text, taken from the record.

A view speaks of its own turn only: of what the environment answered to it, of an effect that the answer does not show
and, at the last turn, of how the episode ended. Wording of an environment is looked up by the record's `env_name`; what
is not registered gets the general one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from agent_system.trajectory import Step, Trajectory

__all__ = ["Wording", "outcome_views", "register_wording"]


@dataclass(frozen=True)
class Wording:
    """Sentences about what the environment's own text does not say; the rest of a view is that text.

    success, failure: the environment ended the episode with or without success. truncated: no turns were left. unseen:
    the turn changed the environment's state, and the observation stayed the same; `{action}` stands for the action.
    """

    success: str = "the task is solved"
    failure: str = "the task is not solved"
    truncated: str = "the task is not solved, and no turns are left"
    unseen: str = "what is seen stays the same, but {action} had an effect"


_GENERAL = Wording()
_WORDINGS: dict[str, Wording] = {
    "webshop": Wording(
        success="the purchase is exactly what was asked for",
        failure="the purchase is not exactly what was asked for",
        truncated="nothing was bought, and no turns are left",
        # In text mode the page does not show which options are chosen, and nothing else changes behind it.
        unseen="the option is selected ({action}), and the page stays the same",
    ),
}


def register_wording(env_name: str, wording: Wording) -> None:
    """Set the wording for records of an environment (the part of `env_name` before the slash)."""
    _WORDINGS[env_name.lower()] = wording


def outcome_views(episode: Trajectory) -> list[str]:
    """One text per turn: the next observation, after a sentence where it hides what the turn changed; at the last turn
    how the episode ended, then the final observation.

    Sentences come first, because a view that is too long loses its own end.
    """
    wording = _WORDINGS.get(episode.env_name.split("/", 1)[0].lower(), _GENERAL)
    views = [_view(step, following, wording) for step, following in pairwise(episode.steps)]
    return [*views, f"\n\nThis turn leads to: {_ending(episode, wording)}.\n{episode.final_observation}"]


def _view(step: Step, following: Step, wording: Wording) -> str:
    is_unseen = step.observation == following.observation and step.state_key != following.state_key
    sentence = f" {wording.unseen.replace('{action}', step.action)}." if is_unseen else ""
    return f"\n\nThis turn leads to:{sentence}\n{following.observation}"


def _ending(episode: Trajectory, wording: Wording) -> str:
    if episode.success:
        return wording.success
    if episode.truncated:
        return wording.truncated
    score = "" if episode.task_score is None else f" (score {episode.task_score:.2f} of 1)"
    return wording.failure + score
