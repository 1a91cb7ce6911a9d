# SPDX-License-Identifier: Apache-2.0
"""Tokenised fine-tuning rows in flat arrays, and the micro-batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["SFTBatch", "TokenRows", "collate_rows"]


@dataclass(frozen=True)
class TokenRows:
    """N tokenised rows in flat arrays; row i is the slice `offsets[i]:offsets[i + 1]` of the first two.

    tokens: (sum of lengths,) int32.
    targets: (sum of lengths,) bool, tokens that the model shall learn to produce: the response with its end token, or
        the assistant's turns; the rest is context.
    offsets: (N + 1,) int64.
    weights: (N,) float32 >= 0, factor of the row's loss.
    """

    tokens: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int64 tokens per row."""
        return np.diff(self.offsets)

    @property
    def num_targets(self) -> np.ndarray:
        """(N,) int64 target tokens per row that enter the loss; the very first token has nothing to predict it from."""
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.targets, dtype=np.int64)])
        starts = self.offsets[:-1]
        counted_first = self.targets[np.minimum(starts, len(self.targets) - 1)] & (self.lengths > 0)
        return before[self.offsets[1:]] - before[starts] - counted_first

    @property
    def num_prompt_targets(self) -> np.ndarray:
        """(N,) int64 context tokens per row that can be predicted."""
        return np.maximum(self.lengths - 1, 0) - self.num_targets

    def row(self, index: int) -> np.ndarray:
        """(L,) int32 ids of one row."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def row_targets(self, index: int) -> np.ndarray:
        """(L,) bool targets of one row."""
        return self.targets[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def from_targets(
        cls,
        ids: Sequence[Sequence[int] | np.ndarray],
        targets: Sequence[Sequence[bool] | np.ndarray],
        weights: Sequence[float] | np.ndarray | None = None,
    ) -> TokenRows:
        """Rows from the ids and targets of each. Raises ValueError when counts differ."""
        if len(ids) != len(targets) or (weights is not None and len(weights) != len(ids)):
            raise ValueError("ids, targets and weights must have one entry per row")
        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        if any(len(mask) != length for mask, length in zip(targets, lengths)):
            raise ValueError("a row must have one target flag per token")
        flat = np.concatenate([np.asarray(row, dtype=np.int32) for row in ids]) if len(ids) else np.empty(0, np.int32)
        marks = np.concatenate([np.asarray(row, dtype=bool) for row in targets]) if len(ids) else np.empty(0, bool)
        return cls(
            flat,
            marks,
            np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
            np.ones(len(ids), np.float32) if weights is None else np.asarray(weights, dtype=np.float32),
        )

    @classmethod
    def from_ids(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        weights: Sequence[float] | np.ndarray | None = None,
    ) -> TokenRows:
        """Rows from separate prompt and response ids. Raises ValueError when the counts differ."""
        if len(prompts) != len(responses):
            raise ValueError("prompts, responses and weights must have one entry per row")
        return cls.from_targets(
            [np.concatenate([np.asarray(p, np.int32), np.asarray(r, np.int32)]) for p, r in zip(prompts, responses)],
            [np.arange(len(p) + len(r)) >= len(p) for p, r in zip(prompts, responses)],
            weights,
        )


@dataclass(frozen=True)
class SFTBatch:
    """Rows right-padded to their own longest.

    input_ids: (B, L) int64. attention_mask: (B, L) int64, 1 on real tokens.
    token_weights: (B, L) float32; entry t is the weight of predicting token t from the tokens before it: the row's
        weight on targets, `prompt_loss_weight` times that on context, 0 on a row's first token and on padding.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    token_weights: torch.Tensor


def collate_rows(
    rows: TokenRows, indices: Sequence[int] | np.ndarray, pad_token_id: int, prompt_loss_weight: float = 0.0
) -> SFTBatch:
    """One micro-batch, as wide as its longest row.

    An index of -1 stands for an empty row, so that ranks with fewer rows can take part in collective operations.
    """
    index = np.asarray(indices, dtype=np.int64)
    safe = np.maximum(index, 0)
    lengths = np.where(index < 0, 0, rows.lengths[safe])
    column = np.arange(max(1, int(lengths.max())))
    real = column[None, :] < lengths[:, None]
    source = np.minimum(rows.offsets[safe][:, None] + column[None, :], len(rows.tokens) - 1)
    ids = np.where(real, rows.tokens[source], pad_token_id).astype(np.int64)
    share = np.where(rows.targets[source], 1.0, prompt_loss_weight) * rows.weights[safe][:, None]
    weights = np.where(real & (column[None, :] > 0), share, 0.0).astype(np.float32)
    return SFTBatch(torch.from_numpy(ids), torch.from_numpy(real.astype(np.int64)), torch.from_numpy(weights))
