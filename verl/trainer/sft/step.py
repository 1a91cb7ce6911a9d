# SPDX-License-Identifier: Apache-2.0
"""Loss of one global batch of fine-tuning rows, accumulated over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from verl.utils.dataset.sft_batching import plan_global_batch
from verl.utils.dataset.sft_dataset import TokenRows, collate_rows
from verl.utils.selected_logits import selected_logits

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
    """
    return _run(
        model,
        rows,
        indices,
        micro_batch_size,
        pad_token_id,
        device,
        group,
        train=True,
        prompt_weight=prompt_loss_weight,
    )


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    rows: TokenRows,
    *,
    micro_batch_size: int,
    pad_token_id: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> LossStats:
    """Loss of all rows without gradient; arguments as in `accumulate_gradients`."""
    indices = np.arange(len(rows), dtype=np.int64)
    return _run(model, rows, indices, micro_batch_size, pad_token_id, device, group, train=False)


def _run(
    model: nn.Module,
    rows: TokenRows,
    indices: np.ndarray,
    micro_batch_size: int,
    pad_token_id: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    train: bool,
    prompt_weight: float = 0.0,
) -> LossStats:
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    lengths = rows.lengths
    targets = np.maximum(rows.num_targets[indices], 0)
    shares = targets + prompt_weight * rows.num_prompt_targets[indices]
    weight = float((shares * rows.weights[indices].astype(np.float64)).sum())
    # Data parallelism averages over ranks; the factor turns the average back into a sum.
    scale = world / weight if weight > 0 else 0.0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    positions = 0
    for micro in plan_global_batch(indices, lengths, micro_batch_size, world):
        batch = collate_rows(rows, micro[rank], pad_token_id, prompt_weight)
        positions += batch.input_ids.numel()
        loss = _loss_sum(model, batch.input_ids.to(device), batch.loss_weights.to(device))
        if train:
            (loss * scale).backward()
        loss_sum += loss.detach().double()
    totals = torch.stack([loss_sum, torch.tensor(float(positions), dtype=torch.float64, device=device)])
    if group is not None:
        dist.all_reduce(totals, group=group)
    mean_loss = float(totals[0]) / weight if weight > 0 else 0.0
    return LossStats(mean_loss, int(lengths[indices].sum()), int(totals[1]), int(targets.sum()))


def _loss_sum(model: nn.Module, input_ids: torch.Tensor, loss_weights: torch.Tensor) -> torch.Tensor:
    row, column = loss_weights.nonzero(as_tuple=True)
    if len(row) == 0:
        # Weight 0 at one position: the backward pass must run on every rank for FSDP's collectives to match.
        row = column = torch.zeros(1, dtype=torch.int64, device=input_ids.device)
    # No attention mask: padding is on the right, so causal attention never lets a real token see it.
    logits = selected_logits(model, input_ids, row, column)
    following = input_ids[row, (column + 1).clamp(max=input_ids.shape[1] - 1)]
    nll = F.cross_entropy(logits.float(), following, reduction="none")
    return (nll * loss_weights[row, column]).sum()
