# SPDX-License-Identifier: Apache-2.0
"""Step credit from a language model: P(necessary) of every step of an episode, without generating a token."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from agent_system.step_discriminator import DISCRIMINATOR_FILE
from agent_system.step_discriminator.shared_prefix import (
    TokenTree,
    build_tree,
    separate_trees,
    supports_trees,
    tree_log_probs,
)
from agent_system.step_discriminator.step_prompt import (
    LABELS,
    TEMPLATE_VERSION,
    EpisodePrompts,
    EpisodeText,
    build_prompts,
)
from agent_system.trajectory import Trajectory
from verl.utils.dataset.sft_dataset import pad_id, tokenize_texts
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

__all__ = [
    "DiscriminatorConfig",
    "DiscriminatorScorer",
    "ScoreStats",
    "credit_from_log_probs",
]

logger = logging.getLogger(__name__)

_MAX_MASK_ELEMENTS = 2**28
"""Bound on batch * length^2 of one forward pass with a tree mask: 256 MiB of booleans."""


@dataclass(frozen=True)
class DiscriminatorConfig:
    """How a discriminator is asked.

    max_length: longest prompt plus label in tokens; longer episodes get shorter observations.
    threshold: a step with credit below it counts as redundant.
    template_version: of the prompt text the model was trained on.
    batch_tokens: most tokens (padding included) of one forward pass on one rank; one episode is never split.
    batch_trajectories: most episodes of one forward pass.
    shared_prefix: False scores every step in a row of its own (slow; for models whose attention takes no mask).
    last_step_necessary: credit 1 for last steps without asking, right for episodes cut at their first success.
    """

    max_length: int = 4096
    threshold: float = 0.5
    template_version: int = TEMPLATE_VERSION
    batch_tokens: int = 16384
    batch_trajectories: int = 64
    shared_prefix: bool = True
    last_step_necessary: bool = True

    def __post_init__(self) -> None:
        if self.template_version != TEMPLATE_VERSION:
            raise UserError(
                f"the discriminator was trained on prompt template {self.template_version}, this program writes "
                f"template {TEMPLATE_VERSION}; train it again"
            )

    @classmethod
    def load(cls, folder: str | Path, **changes: Any) -> DiscriminatorConfig:
        """The settings a discriminator folder was saved with (`discriminator.json`), with `changes` on top.

        Raises:
            UserError: no such file, or not the settings of a discriminator.
        """
        file = Path(folder).expanduser() / DISCRIMINATOR_FILE
        if not file.is_file():
            raise UserError(
                f"{file} does not exist, so {folder} is no discriminator; give the folder that stage 2 "
                "(run_training_<env>.sh) wrote"
            )
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            saved = {key: data[key] for key in ("max_length", "threshold", "template_version")}
            labels = tuple(data["labels"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} does not hold the settings of a discriminator ({error!r})") from error
        if labels != LABELS:
            raise UserError(f"{file}: labels {list(labels)} are not this program's {list(LABELS)}; train it again")
        return cls(**(saved | changes))

    def save(self, folder: str | Path, tokenizer: Any, metrics: dict[str, Any] | None = None) -> None:
        """Write `discriminator.json` into a model folder: settings, label tokens, validation metrics."""
        record = {
            "template_version": self.template_version,
            "labels": list(LABELS),
            "label_token_ids": tokenize_texts(LABELS, tokenizer),
            "max_length": self.max_length,
            "threshold": self.threshold,
            "metrics": metrics,
        }
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        atomic_write(Path(folder).expanduser() / DISCRIMINATOR_FILE, text)


@dataclass
class ScoreStats:
    """Counts over the calls of one scorer.

    forward_tokens: tokens that went through the model, with padding. separate_tokens: what one row per step and
    label would have taken without padding.
    """

    trajectories: int = 0
    steps: int = 0
    shortened: int = 0
    too_long: int = 0
    forwards: int = 0
    forward_tokens: int = 0
    separate_tokens: int = 0


def credit_from_log_probs(log_probs: np.ndarray) -> np.ndarray:
    """P(necessary) / (P(necessary) + P(redundant)): (N, 2) log-probabilities in the order of LABELS -> (N,) float32."""
    difference = np.clip(log_probs[:, 0] - log_probs[:, 1], -700.0, 700.0)
    return (1.0 / (1.0 + np.exp(difference))).astype(np.float32)


class DiscriminatorScorer:
    """Scores episodes with a causal language model, plain or sharded.

    The model is used as it is (device, precision, train or eval mode is set to eval and restored).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: DiscriminatorConfig,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Attach to a model.

        Args:
            device: where the forward pass runs; default the device of the model's parameters.
            group: the ranks a model is sharded over, when they score different lists: every rank then runs as many
                forward passes as the busiest one, as the weights are gathered by all together.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.stats = ScoreStats()
        self._group = group
        self._device = next(model.parameters()).device if device is None else device
        self._labels = tokenize_texts(LABELS, tokenizer)
        self._pad = pad_id(tokenizer)
        self._trees = config.shared_prefix and supports_trees(model)
        if config.shared_prefix and not self._trees:
            logger.info("this model's attention takes no tree mask: each step is scored in a row of its own")

    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Credit of every step: one (T,) float32 array per trajectory, 1 necessary ... 0 redundant.

        A trajectory whose task and actions alone are longer than `max_length` gets 1 for every step (no step of it
        can be called redundant) and is counted in `stats.too_long`. Collective when a group was given.
        """
        prompts = [
            build_prompts(EpisodeText.from_trajectory(trajectory), self.tokenizer, self.config.max_length)
            for trajectory in trajectories
        ]
        self.stats.shortened += sum(item.shortened for item in prompts)
        too_long = [index for index, item in enumerate(prompts) if not item.fits]
        self.stats.too_long += len(too_long)
        if too_long:
            logger.warning(
                "%d of %d trajectories are too long for max_length=%d even without observations: all steps count as "
                "necessary",
                len(too_long),
                len(prompts),
                self.config.max_length,
            )
        return self._score_fitting(prompts)

    def _score_fitting(self, prompts: Sequence[EpisodePrompts]) -> list[np.ndarray]:
        asked = []
        for item in prompts:
            count = len(item.texts) - 1 if self.config.last_step_necessary else len(item.texts)
            asked.append(list(range(count)) if item.fits else [])
        groups = [[item.token_ids[i] for i in chosen] for item, chosen in zip(prompts, asked) if chosen]
        scores = iter(self.score_token_ids(groups))
        credits = []
        for item, chosen in zip(prompts, asked):
            credit = np.ones(len(item.texts), dtype=np.float32)
            if chosen:
                credit[chosen] = next(scores)
            credits.append(credit)
        return credits

    def score_token_ids(self, groups: Sequence[Sequence[Sequence[int]]]) -> list[np.ndarray]:
        """Credit after prompts given as token ids, grouped by episode: one (N,) float32 array per group."""
        jobs: list[TokenTree] = []
        owner: list[int] = []
        for index, group in enumerate(groups):
            trees = [build_tree(group, self._labels)] if self._trees else separate_trees(group, self._labels)
            jobs += trees
            owner += [index] * len(trees)
            label_tokens = sum(map(len, self._labels))
            self.stats.separate_tokens += sum(len(self._labels) * len(prompt) + label_tokens for prompt in group)
        results = self._forward_all(jobs)
        collected: list[list[np.ndarray]] = [[] for _ in groups]
        for index, result in zip(owner, results):
            collected[index].append(result)
        self.stats.trajectories += len(groups)
        self.stats.steps += sum(map(len, groups))
        return [
            credit_from_log_probs(np.concatenate(parts).reshape(len(group), len(LABELS)))
            for group, parts in zip(groups, collected)
        ]

    def _forward_all(self, jobs: list[TokenTree]) -> list[np.ndarray]:
        batches = self._batches(jobs)
        results: list[np.ndarray | None] = [None] * len(jobs)
        device = self._device
        training = self.model.training
        self.model.eval()
        try:
            for number in range(self._num_forwards(len(batches), device)):
                # A rank that is done goes on with a filler, for the others' sake.
                chosen = batches[number] if number < len(batches) else []
                trees = [jobs[i] for i in chosen] or [build_tree([[self._pad]], self._labels[:1])]
                values = tree_log_probs(self.model, trees, pad_token_id=self._pad, device=device)
                for i, value in zip(chosen, values):
                    results[i] = value
                self.stats.forwards += 1
                self.stats.forward_tokens += len(trees) * max(map(len, trees))
        finally:
            self.model.train(training)
        return [result for result in results if result is not None]

    def _num_forwards(self, own: int, device: torch.device) -> int:
        if self._group is None:
            return own
        count = torch.tensor([own], dtype=torch.int64, device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._group)
        return int(count.item())

    def _batches(self, jobs: Sequence[TokenTree]) -> list[list[int]]:
        """Indices of jobs by forward pass, similar lengths together."""
        order = sorted(range(len(jobs)), key=lambda i: (-len(jobs[i]), i))
        batches: list[list[int]] = []
        for index in order:
            width = len(jobs[batches[-1][0]]) if batches else 0
            size = len(batches[-1]) + 1 if batches else 0
            full = (
                size > self.config.batch_trajectories
                or size * width > self.config.batch_tokens
                or size * width * width > _MAX_MASK_ELEMENTS
            )
            if not batches or full:
                batches.append([index])
            else:
                batches[-1].append(index)
        return batches
