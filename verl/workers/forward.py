# SPDX-License-Identifier: Apache-2.0
"""One forward pass over prompt-and-response rows that pays only for real tokens.

Rows come as ``[left-padded prompt | right-padded response]``. They are run either shifted to the left and cut to the
longest, where causal attention needs no mask at all, or packed into one sequence whose positions start again at each
row. The head runs only where a response token is predicted: at the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.utils.selected_logits import selected_logits
from verl.workers.packed_attention import PackedRows

__all__ = ["HeadOutputs", "RowForward"]


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of a model's head for K response tokens.

    ``values`` ``(K, V)`` float32; token k is column ``column[k]`` of row ``row[k]`` in the ``(B, R)`` response. When
    no token was asked for, one is run all the same, with ``scale`` 0: sharded models must run on every rank, and
    backward must reach every parameter.
    """

    values: Tensor
    row: Tensor
    column: Tensor
    shape: torch.Size
    scale: float

    def place(self, per_token: Tensor) -> Tensor:
        """``(K,)`` numbers into ``(B, R)``, 0 elsewhere."""
        empty = torch.zeros(self.shape, dtype=per_token.dtype, device=per_token.device)
        return empty.index_put((self.row, self.column), per_token * self.scale)


class RowForward:
    """Forward pass of a model with a per-token head, plain or sharded.

    Args:
        model: a Hugging Face causal language model or token classifier, before or after FSDP.
        packed: run all rows as one sequence; the model's attention must be one that
            `verl.workers.model_builder.resolve_attn_implementation` gives for packing.
    """

    def __init__(self, model: nn.Module, *, packed: bool = False) -> None:
        self.model = model
        self.packed = packed

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, token_mask: Tensor) -> HeadOutputs:
        """Head outputs that predict (or come before) the response tokens where ``token_mask`` is set.

        Args:
            input_ids, attention_mask: ``(B, S)``; the ones of a row are contiguous and its positions count them.
            token_mask: ``(B, R)``, a subset of the last R columns of ``attention_mask``.
        """
        mask = attention_mask.bool()
        if not mask.any():
            mask = mask.clone()
            mask[0, 0] = True
        row, column = token_mask.bool().nonzero(as_tuple=True)
        empty = row.numel() == 0
        if empty:
            row = column = torch.zeros(1, dtype=torch.int64, device=input_ids.device)
        index_in_row = mask.long().cumsum(dim=1) - 1
        offset = input_ids.shape[1] - token_mask.shape[1]
        before = (index_in_row[row, column + offset] - 1).clamp(min=0)
        run = self._packed_run if self.packed else self._padded_run
        values = run(input_ids, mask, index_in_row, row, before)
        return HeadOutputs(values.float(), row, column, token_mask.shape, 0.0 if empty else 1.0)

    def _padded_run(self, input_ids: Tensor, mask: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        longest = int(mask.sum(dim=1).max())
        first = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        return selected_logits(self.model, input_ids.gather(1, first), row, column)

    def _packed_run(self, input_ids: Tensor, mask: Tensor, index_in_row: Tensor, row: Tensor, column: Tensor) -> Tensor:
        lengths = mask.sum(dim=1)
        order = lengths.argsort(descending=True, stable=True)
        ordered = lengths[order]
        starts = torch.empty_like(lengths)
        starts[order] = ordered.cumsum(0) - ordered
        ids = input_ids[order][mask[order]]
        positions = index_in_row[order][mask[order]]
        options = _packing_arguments([length for length in ordered.tolist() if length], ids.device)
        return selected_logits(
            self.model, ids[None], torch.zeros_like(row), starts[row] + column, position_ids=positions[None], **options
        )


def _packing_arguments(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """What attention needs to keep rows apart: our SDPA reads ``packed_rows``, flash-attention the rest."""
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    bounds = bounds.to(device)
    return {
        "packed_rows": PackedRows(lengths, device),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
