# SPDX-License-Identifier: Apache-2.0
"""What the step-credit discriminator reads: one finished episode, and last the step that is asked about."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_system.step_discriminator.shown_observations import shown_observations
from agent_system.trajectory import Trajectory
from verl.utils.dataset.sft_dataset import TokenRows, render_prompts, tokenize_pairs, tokenize_texts

__all__ = [
    "LABELS",
    "NECESSARY",
    "REDUNDANT",
    "TEMPLATE_VERSION",
    "CreditRow",
    "EpisodePrompts",
    "EpisodeText",
    "build_prompts",
    "credit_rows",
    "rows_to_tokens",
    "step_prompt",
]

logger = logging.getLogger(__name__)

TEMPLATE_VERSION = 1
"""Raised whenever the text around an episode changes: a model is scored with the template it was trained on."""

NECESSARY = "necessary"
REDUNDANT = "redundant"
LABELS = (REDUNDANT, NECESSARY)
"""Response text by label: index 0 redundant, 1 necessary."""

_RESPONSE_EXTRA = 1  # the end-of-sequence token
_CUT_MARK = "..."

_INTRO = (
    "Below is a finished episode. Judge one of its steps: redundant if the task would still have been solved "
    "without it, else necessary."
)


@dataclass(frozen=True)
class EpisodeText:
    """The part of an episode the discriminator may see: no rewards, no credit, no expert's notes.

    task: instruction text.
    observations: T + 1 texts, before each action and after the last one, without the task text.
    actions: T texts as sent to the environment.
    All are single lines: white space is collapsed.
    """

    task: str
    observations: tuple[str, ...]
    actions: tuple[str, ...]

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> EpisodeText:
        """Text of a whole trajectory.

        Raises:
            ValueError: it has no steps.
        """
        if not trajectory.steps:
            raise ValueError(f"{trajectory.traj_uid} has no steps")
        task = _one_line(str(trajectory.task.get("instruction", "")))
        seen = shown_observations(trajectory)
        # Environments repeat the task in what they show; the prompt names it once, at the top.
        lines = [_one_line(text) for text in seen]
        return cls(
            task,
            tuple(_one_line(line.replace(task, "")) if task else line for line in lines),
            tuple(_one_line(step.action) for step in trajectory.steps),
        )

    def capped(self, limit: int) -> EpisodeText:
        """The same with every observation cut to at most `limit` characters (and a mark); task and actions stay."""
        return replace(self, observations=tuple(_cut(text, limit) for text in self.observations))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit].rstrip() + _CUT_MARK


def _context(episode: EpisodeText) -> str:
    lines = [_INTRO, f"Task: {episode.task}", episode.observations[0]]
    for index, action in enumerate(episode.actions):
        lines += [f"{index}> {action}", episode.observations[index + 1]]
    return "\n".join(lines)


def step_prompt(episode: EpisodeText, step_index: int) -> str:
    """Prompt about one step. Everything before the last two lines is the same for all steps of the episode."""
    return _with_question(_context(episode), episode.actions[step_index], step_index)


def _with_question(context: str, action: str, step_index: int) -> str:
    # The action is repeated beside its index: small models find the step by its words.
    return f"{context}\nJudge: {action}\nStep {step_index}"


@dataclass(frozen=True)
class EpisodePrompts:
    """Prompts of one episode, one per step, over one shared (possibly shortened) text.

    texts: T user messages. token_ids: T lists of ids through the chat template, ending where the answer starts.
    shortened: observations were cut. fits: every prompt with its longer label and end token has at most `max_length`
    tokens; False when even without observations it has more.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    shortened: bool
    fits: bool


def build_prompts(episode: EpisodeText, tokenizer: Any, max_length: int) -> EpisodePrompts:
    """Prompts for all steps, shortened once for the whole episode if any of them is too long.

    Shortening finds the largest number of characters that an observation may keep, so the longest observations lose
    first and equally long ones alike. Task and actions are never touched. An episode that does not fit even then comes
    back with `fits=False` and its observations gone.
    """
    room = max_length - _label_room(tokenizer)
    texts = _texts(episode)
    ids = _ids(texts, tokenizer)
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    if len(ids[longest]) <= room:
        return EpisodePrompts(texts, ids, shortened=False, fits=True)

    def length(limit: int) -> int:
        return len(_ids((step_prompt(episode.capped(limit), longest),), tokenizer)[0])

    low, high = 0, max(len(text) for text in episode.observations)  # high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(middle) <= room else (low, middle)
    # Token counts are not exactly monotone in characters, nor is the longest question the same after cutting.
    while True:
        cut = episode.capped(low)
        texts = _texts(cut)
        ids = _ids(texts, tokenizer)
        fits = max(map(len, ids)) <= room
        if fits or low == 0:
            return EpisodePrompts(texts, ids, shortened=True, fits=fits)
        low -= 1


def _texts(episode: EpisodeText) -> tuple[str, ...]:
    context = _context(episode)
    return tuple(_with_question(context, action, index) for index, action in enumerate(episode.actions))


def _ids(texts: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, tokenize_texts(render_prompts(texts, tokenizer), tokenizer)))


def _label_room(tokenizer: Any) -> int:
    return max(map(len, tokenize_texts(LABELS, tokenizer))) + _RESPONSE_EXTRA


@dataclass(frozen=True)
class CreditRow:
    """One training row: a step's prompt and its label (1 necessary, 0 redundant)."""

    prompt: str
    response: str
    traj_uid: str
    step_index: int
    label: int
    weight: float = 1.0


def credit_rows(
    traj_uid: str,
    episode: EpisodeText,
    credits: Sequence[int],
    prompts: EpisodePrompts,
) -> list[CreditRow]:
    """Rows of one labelled episode; the last step is left out, it is necessary by construction.

    Args:
        credits: T labels, 1 necessary or 0 redundant.
        prompts: from `build_prompts` on the same episode.

    Raises:
        ValueError: counts differ or a label is neither 0 nor 1.
    """
    if len(credits) != len(episode.actions) or len(prompts.texts) != len(credits):
        raise ValueError(f"{traj_uid}: {len(credits)} labels for {len(episode.actions)} steps")
    if any(credit not in (0, 1) for credit in credits):
        raise ValueError(f"{traj_uid}: labels must be 0 or 1, got {list(credits)}")
    return [
        CreditRow(prompts.texts[index], LABELS[int(credits[index])], traj_uid, index, int(credits[index]))
        for index in range(len(credits) - 1)
    ]


def rows_to_tokens(rows: Sequence[CreditRow], tokenizer: Any, max_length: int) -> TokenRows:
    """Token rows for the fine-tuning step: the same ids that a parquet file of the same rows gives the SFT program."""
    return tokenize_pairs(
        [row.prompt for row in rows],
        [row.response for row in rows],
        tokenizer,
        max_length=max_length,
        weights=[row.weight for row in rows],
        where="credit row",
    )
