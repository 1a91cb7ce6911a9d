# SPDX-License-Identifier: Apache-2.0
"""One forward pass over prompt-and-response rows that pays only for real tokens.

Rows come as ``[left-padded prompt | right-padded response]``. They are run either shifted to the left, where causal
attention needs no mask at all (what is behind a row's last token cannot be seen by it), or packed into one sequence
whose positions start again at each row. Logits are computed only where a response token is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl.utils.selected_logits import selected_logits
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

__all__ = ["MicroBatching", "ResponseForward", "TokenScores"]


@dataclass(frozen=True)
class MicroBatching:
    """How rows are cut for a forward pass: a number of rows, or (``max_tokens`` set) a token budget."""

    rows: int | None = None
    max_tokens: int | None = None

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Row indices of each micro-batch; rows of similar length go together. The same count on all ranks.

        Raises:
            ValueError: a row alone is over the token budget, or neither size is set.
        """
        if self.max_tokens is not None:
            return rearrange_micro_batches(lengths, self.max_tokens)
        if self.rows is None:
            raise ValueError("set a micro-batch size, or a token budget with dynamic batching")
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        return [order[start : start + self.rows] for start in range(0, len(order), self.rows)]


@dataclass(frozen=True)
class TokenScores:
    """Per-token results ``(B, R)`` float32, 0 where nothing was asked for. ``entropy`` is None unless asked for."""

    log_probs: Tensor
    entropy: Tensor | None


class ResponseForward:
    """Forward pass of a causal language model, plain or sharded, to log-probabilities of response tokens.

    Args:
        model: a Hugging Face causal language model, before or after FSDP.
        packed: run all rows as one sequence (needs an attention implementation that separates rows by their position
            ids: flash-attention does so at no cost, SDPA by a full mask).
    """

    def __init__(self, model: nn.Module, *, packed: bool = False) -> None:
        self.model = model
        self.packed = packed

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_mask: Tensor,
        *,
        temperature: float,
        with_entropy: bool = False,
    ) -> TokenScores:
        """Scores of the response tokens where ``token_mask`` is set.

        Args:
            input_ids, attention_mask: ``(B, P + R)``; the ones of a row are contiguous and its positions count them.
            token_mask: ``(B, R)``, a subset of the last R columns of ``attention_mask``.
            temperature: divides the logits, as in sampling.
        """
        width = input_ids.shape[1]
        mask = attention_mask.bool()
        wanted = token_mask.bool()
        row, column = wanted.nonzero(as_tuple=True)
        empty = row.numel() == 0
        if empty:
            # Sharded models must run on every rank, and backward must reach every parameter.
            row = column = torch.zeros(1, dtype=torch.int64, device=input_ids.device)
        index_in_row = mask.long().cumsum(dim=1) - 1
        predictor = (index_in_row[row, column + (width - token_mask.shape[1])] - 1).clamp(min=0)
        lengths = mask.sum(dim=1)
        if self.packed:
            starts = lengths.cumsum(0) - lengths
            run_ids, run_row, run_column = input_ids[mask][None], torch.zeros_like(row), starts[row] + predictor
            extra = {"position_ids": index_in_row[mask][None]}
        else:
            longest = max(1, int(lengths.max()))
            first = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
            run_ids, run_row, run_column = input_ids.gather(1, first), row, predictor
            extra = {}
        logits = selected_logits(self.model, run_ids, run_row, run_column, **extra).float() / temperature
        labels = input_ids[row, column + (width - token_mask.shape[1])]
        scale = 0.0 if empty else 1.0
        log_probs = _place(logprobs_from_logits(logits, labels) * scale, row, column, token_mask.shape)
        if not with_entropy:
            return TokenScores(log_probs, None)
        return TokenScores(log_probs, _place(entropy_from_logits(logits) * scale, row, column, token_mask.shape))


def _place(values: Tensor, row: Tensor, column: Tensor, shape: torch.Size) -> Tensor:
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_put((row, column), values)
