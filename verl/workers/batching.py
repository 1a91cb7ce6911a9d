# SPDX-License-Identifier: Apache-2.0
"""How rows are cut into micro-batches, shared by every role that runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl.utils.seqlen_balancing import rearrange_micro_batches

__all__ = ["MicroBatching", "row_lengths"]


@dataclass(frozen=True)
class MicroBatching:
    """A number of rows, or (``max_tokens`` set) a token budget."""

    rows: int | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, rows: int | None, use_dynamic_bsz: bool, max_tokens: int) -> MicroBatching:
        """From a config section: its per-rank micro-batch size, its switch for token budgets, its budget."""
        return cls(max_tokens=max_tokens) if use_dynamic_bsz else cls(rows=rows)

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Row indices of each micro-batch; with a number of rows, rows of similar length go together.

        The same count on all ranks that have the same number of rows.

        Raises:
            ValueError: a row alone is over the token budget, or neither size is set.
        """
        if self.max_tokens is not None:
            return rearrange_micro_batches(lengths, self.max_tokens)
        if self.rows is None:
            raise ValueError("set a micro-batch size, or a token budget with dynamic batching")
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        return [order[start : start + self.rows] for start in range(0, len(order), self.rows)]


def row_lengths(attention_mask: Tensor) -> list[int]:
    """Real tokens of each row of ``(B, S)``."""
    lengths: list[int] = attention_mask.sum(dim=1).tolist()
    return lengths
