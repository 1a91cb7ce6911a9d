# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps over mini-batches, shared by actor and critic.

A mini-batch's loss is normalised by its own token (or row) count over all ranks, so the update does not depend on
micro-batch size, packing, dynamic batching or the number of ranks, and rows with an empty response mask change nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.protocol import DataProto
from verl.trainer.ppo.columns import tensors_of
from verl.utils.distributed import all_reduce_sums
from verl.utils.fsdp_utils import finite_step
from verl.workers.batching import MicroBatching, row_lengths

__all__ = ["BatchCounts", "LossFn", "UpdateLoop", "response_mask_of"]


@dataclass(frozen=True)
class BatchCounts:
    """Size of one mini-batch over all ranks: response tokens, and rows with at least one of them."""

    tokens: float
    rows: float


LossFn = Callable[[TensorDict, BatchCounts], tuple[Tensor, dict[str, Tensor]]]
"""``(micro-batch, counts of its mini-batch) -> (loss, metrics)``, both shares: their sums over the micro-batches of all
ranks are the mini-batch's."""


def response_mask_of(data: DataProto) -> Tensor:
    """``response_mask`` of the batch, else the attention mask of its response columns; ``(B, R)``."""
    batch = tensors_of(data)
    if "response_mask" in batch:
        return batch["response_mask"]
    return batch["attention_mask"][:, -batch["responses"].shape[1] :]


class UpdateLoop:
    """Passes over a batch, one optimizer step per mini-batch.

    Args:
        model: gradients are averaged over ranks by FSDP.
        mini_batch_size: rows per step over all ranks.
        size_key: config key of it, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        batching: MicroBatching,
        mini_batch_size: int,
        epochs: int,
        grad_clip: float,
        size_key: str,
    ) -> None:
        self.model = model
        self.device = device
        self.batching = batching
        self.mini_batch_size = mini_batch_size
        self.epochs = epochs
        self.grad_clip = grad_clip
        self.size_key = size_key
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def run(self, data: DataProto, optimizer: Optimizer, loss_fn: LossFn) -> dict[str, float]:
        """Rows in order, the last mini-batch may be smaller.

        Args:
            data: this rank's rows with ``attention_mask``, ``response_mask`` and what the loss reads. Equal row counts
                on all ranks.

        Returns:
            Means over the steps of the loss' metrics and ``grad_norm`` (before clipping), reduced over ranks;
            ``skipped_steps``: steps left out because the gradient was not finite.

        Raises:
            ValueError: the mini-batch has no row for each rank.
        """
        self.model.train()
        mini_batches = self._mini_batches(data)
        counts = self._count(mini_batches)
        collected: dict[str, list[float]] = defaultdict(list)
        skipped = 0
        for _ in range(self.epochs):
            for mini_batch, count in zip(mini_batches, counts):
                if count.tokens == 0:
                    # Nothing to learn from; a step would still move weights by momentum and weight decay.
                    continue
                sums = self._accumulate(mini_batch, count, loss_fn)
                grad_norm = finite_step(self.model, [optimizer], self.grad_clip)
                if not math.isfinite(grad_norm):
                    skipped += 1
                    continue
                for name, value in all_reduce_sums(sums, self.device).items():
                    collected[name].append(value)
                collected["grad_norm"].append(grad_norm)
        metrics = {name: sum(values) / len(values) for name, values in collected.items()}
        metrics["skipped_steps"] = float(skipped)
        return metrics

    def _mini_batches(self, data: DataProto) -> list[TensorDict]:
        size = self.mini_batch_size // self.world_size
        if size == 0:
            raise ValueError(
                f"{self.size_key}={self.mini_batch_size} is smaller than the {self.world_size} ranks; every rank needs "
                "at least one row of a mini-batch"
            )
        rows = tensors_of(data)
        return [rows[start : start + size] for start in range(0, len(data), size)]

    def _count(self, mini_batches: list[TensorDict]) -> list[BatchCounts]:
        local: dict[str, float] = {}
        for number, mini_batch in enumerate(mini_batches):
            lengths = mini_batch["response_mask"].sum(dim=1)
            local[f"{number}/tokens"] = float(lengths.sum())
            local[f"{number}/rows"] = float((lengths > 0).sum())
        summed = all_reduce_sums(local, self.device)
        return [BatchCounts(summed[f"{i}/tokens"], summed[f"{i}/rows"]) for i in range(len(mini_batches))]

    def _accumulate(self, mini_batch: TensorDict, count: BatchCounts, loss_fn: LossFn) -> dict[str, float]:
        """Forward and backward over the micro-batches; this rank's share of each metric."""
        sums: dict[str, Tensor] = {}
        for index in self.batching.split(row_lengths(mini_batch["attention_mask"])):
            loss, parts = loss_fn(mini_batch[index].to(self.device), count)
            # FSDP averages gradients over ranks; the loss is already a share of the global mini-batch's.
            (loss * self.world_size).backward()
            for name, value in parts.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
        return {name: value.item() for name, value in sums.items()}
