# SPDX-License-Identifier: Apache-2.0
"""Loss of one global batch of fine-tuning rows, accumulated over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from verl.utils.dataset.sft_batching import plan_global_batch
from verl.utils.dataset.token_rows import SFTBatch, TokenRows, collate_rows
from verl.workers.forward import RowForward

__all__ = ["LossStats", "accumulate_gradients", "evaluate_loss"]


@dataclass(frozen=True)
class LossStats:
    """Loss of a set of rows over all ranks.

    loss: sum of w_row * nll_t over target tokens, divided by the sum of w_row over the same tokens. Prompt
        tokens, where they enter the loss, count `prompt_loss_weight` in both sums.
    num_tokens: real tokens of the rows (prompt and response). num_positions: the same with padding.
    num_targets: tokens that entered the loss.
    """

    loss: float
    num_tokens: int
    num_positions: int
    num_targets: int


def accumulate_gradients(
    model: nn.Module,
    rows: TokenRows,
    indices: np.ndarray,
    *,
    micro_batch_size: int,
    pad_token_id: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    prompt_loss_weight: float = 0.0,
    packed: bool = False,
) -> LossStats:
    """Add the gradient of one global batch's loss to `model`.

    The loss is normalised by the weighted token count of the whole global batch, known before the first forward, so
    micro-batch size and number of ranks change nothing but the order of additions. Every rank passes the same
    `rows` and `indices` and handles its own share.

    Args:
        indices: (B,) int64 rows of the global batch.
        micro_batch_size: rows per forward on one rank.
        group: the ranks that share the batch; None = this process alone. The model's data-parallel wrapper is
            expected to average gradients over the same ranks.
        prompt_loss_weight: weight of predicting a prompt token, relative to a response token's 1.
        packed: run the rows of a micro-batch as one sequence without padding (see `RowForward`).
    """
    share = _Share(rows, indices, micro_batch_size, pad_token_id, device, group, prompt_loss_weight, packed)
    return _run(model, share, train=True)


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    rows: TokenRows,
    *,
    micro_batch_size: int,
    pad_token_id: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    packed: bool = False,
) -> LossStats:
    """Loss of all rows without gradient; arguments as in `accumulate_gradients`."""
    indices = np.arange(len(rows), dtype=np.int64)
    return _run(model, _Share(rows, indices, micro_batch_size, pad_token_id, device, group, 0.0, packed), train=False)


@dataclass(frozen=True)
class _Share:
    """What one rank does of a global batch; fields as in `accumulate_gradients`."""

    rows: TokenRows
    indices: np.ndarray
    micro_batch_size: int
    pad_token_id: int
    device: torch.device
    group: dist.ProcessGroup | None
    prompt_weight: float
    packed: bool

    @property
    def rank_and_world(self) -> tuple[int, int]:
        return (0, 1) if self.group is None else (dist.get_rank(self.group), dist.get_world_size(self.group))

    def batches(self) -> Iterator[SFTBatch]:
        rank, world = self.rank_and_world
        for micro in plan_global_batch(self.indices, self.rows.lengths, self.micro_batch_size, world):
            yield collate_rows(self.rows, micro[rank], self.pad_token_id, self.prompt_weight)


def _run(model: nn.Module, share: _Share, *, train: bool) -> LossStats:
    rows, indices, device = share.rows, share.indices, share.device
    _, world = share.rank_and_world
    targets = rows.num_targets[indices]
    counted = targets + share.prompt_weight * rows.num_prompt_targets[indices]
    weight = float((counted * rows.weights[indices].astype(np.float64)).sum())
    # Data parallelism averages over ranks; the factor turns the average back into a sum.
    scale = world / weight if weight > 0 else 0.0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    positions = 0
    forward = RowForward(model, packed=share.packed)
    for batch in share.batches():
        positions += int(batch.attention_mask.sum()) if share.packed else batch.input_ids.numel()
        loss = _loss_sum(forward, batch, device)
        if train:
            (loss * scale).backward()
        loss_sum += loss.detach().double()
    totals = torch.stack([loss_sum, torch.tensor(float(positions), dtype=torch.float64, device=device)])
    if share.group is not None:
        dist.all_reduce(totals, group=share.group)
    mean_loss = float(totals[0]) / weight if weight > 0 else 0.0
    return LossStats(mean_loss, int(rows.lengths[indices].sum()), int(totals[1]), int(targets.sum()))


def _loss_sum(forward: RowForward, batch: SFTBatch, device: torch.device) -> torch.Tensor:
    input_ids, weights = batch.input_ids.to(device), batch.token_weights.to(device)
    out = forward(input_ids, batch.attention_mask.to(device), weights != 0)
    nll = F.cross_entropy(out.values, input_ids[out.row, out.column], reduction="none")
    return (nll * weights[out.row, out.column]).sum() * out.scale
