# SPDX-License-Identifier: Apache-2.0
"""Order of fine-tuning rows: seeded epochs, and micro-batches of similar length inside each global batch."""

from __future__ import annotations

import numpy as np

__all__ = ["epoch_order", "plan_global_batch", "steps_per_epoch"]


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Optimizer steps of one epoch: the incomplete last batch is left out, except when it is the only one."""
    return max(1, num_rows // batch_size)


def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """(num_rows,) int64 permutation of the rows; a function of (seed, epoch) only, so a resumed run finds its place."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def plan_global_batch(
    indices: np.ndarray, lengths: np.ndarray, micro_batch_size: int, world_size: int = 1
) -> np.ndarray:
    """Cut one global batch into micro-batches of similar length, the same number on every rank.

    Rows are sorted by length and dealt to the ranks in turn, so the ranks' k-th micro-batches are about equally wide.

    Args:
        indices: (B,) int64 rows of the batch.
        lengths: (N,) tokens of every row of the data set.

    Returns:
        (M, world_size, micro_batch_size) int64; -1 where there is no row left.
    """
    ordered = indices[np.lexsort((indices, -lengths[indices]))]
    group = micro_batch_size * world_size
    num_micro = -(-len(ordered) // group)
    padded = np.full(num_micro * group, -1, dtype=np.int64)
    padded[: len(ordered)] = ordered
    return padded.reshape(num_micro, micro_batch_size, world_size).transpose(0, 2, 1)
