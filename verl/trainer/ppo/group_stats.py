# SPDX-License-Identifier: Apache-2.0
"""Statistics of groups of rows and sums along trajectories: what every estimator is made of. No loop over rows.

Group keys are any hashable values, one per row; equal keys form a group.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "GroupIndex",
    "Singleton",
    "combine_labels",
    "dense_labels",
    "factorize",
    "first_rows",
    "group_stats",
    "label_trajectories",
    "suffix_sums",
]

Singleton: TypeAlias = Literal["reference", "zero"]
GroupIndex: TypeAlias = Sequence[Hashable] | np.ndarray


def factorize(keys: GroupIndex) -> np.ndarray:
    """Number equal keys with equal integers, in order of first appearance: ``(B,)`` int64. O(B)."""
    values = keys.tolist() if isinstance(keys, np.ndarray) else keys
    numbers: defaultdict[Hashable, int] = defaultdict(itertools.count().__next__)
    return np.fromiter(map(numbers.__getitem__, values), dtype=np.int64, count=len(values))


def combine_labels(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Number equal pairs of labels with equal integers, in order of first appearance: ``(B,)`` int64. O(B log B).

    Args:
        first, second: ``(B,)`` non-negative integers below 2^31.
    """
    width = int(second.max()) + 1 if len(second) else 1
    in_order = np.unique(first * width + second, return_inverse=True)[1]
    first_row = first_rows(in_order)
    number = np.empty_like(first_row)
    number[np.argsort(first_row)] = np.arange(len(first_row))
    return number[in_order]


def first_rows(labels: np.ndarray) -> np.ndarray:
    """Row in which each label appears first, ``(max + 1,)`` int64; 0 for a label that never does."""
    rows = np.zeros(int(labels.max()) + 1 if len(labels) else 0, dtype=np.int64)
    # Assignment keeps the last of several values: written backwards, the first row stays.
    rows[labels[::-1]] = np.arange(len(labels) - 1, -1, -1)
    return rows


def label_trajectories(group: np.ndarray, traj_index: GroupIndex | None) -> np.ndarray:
    """Number the trajectories of all groups in order of first appearance: ``(B,)`` int64.

    Raises:
        ValueError: there is not one trajectory key per row.
    """
    if traj_index is None or len(traj_index) != len(group):
        raise ValueError("one entry per trajectory needs one trajectory key per row")
    return combine_labels(group, dense_labels(traj_index))


def dense_labels(index: GroupIndex) -> np.ndarray:
    """Labels fit for ``np.bincount``, ``(B,)`` int64; an array of small integers is used as it is."""
    if not (isinstance(index, np.ndarray) and index.dtype.kind in "iu" and index.size):
        return factorize(index)
    is_dense = index.min() >= 0 and index.max() < 4 * index.size + 64
    return index.astype(np.int64, copy=False) if is_dense else factorize(index)


def group_stats(
    scores: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    cross_steps: bool = True,
    singleton: Singleton = "reference",
    unbiased: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and number of entries of each row's group.

    Args:
        scores: ``(B,)`` floats, one per row.
        index: ``(B,)`` group keys; equal keys form one group.
        traj_index: ``(B,)`` trajectory keys; only read when ``cross_steps`` is False.
        cross_steps: True: every row is an entry, so long episodes weigh more (the reference's default).
            False: one entry per trajectory, its first row in batch order (so rows must be in turn order).
        singleton: statistics of a group with one entry. ``reference``: mean 0, std 1 (the score passes through
            unchanged); ``zero``: mean = the entry, std 1 (the advantage is 0).
        unbiased: divide squares by n - 1; False: by n.

    Returns:
        ``(mean, std, count)``, each ``(B,)``; mean and std float64, count int64. Sums run in float64, so a group of
        equal scores has std exactly 0 whatever the order of its rows.

    Raises:
        ValueError: lengths differ, or ``cross_steps`` is False without ``traj_index``.
    """
    num_rows = len(scores)
    group = dense_labels(index)
    if scores.dim() != 1 or len(group) != num_rows:
        raise ValueError(f"scores of shape {tuple(scores.shape)} and {len(group)} group keys do not match")
    weight = None
    if not cross_steps:
        weight = np.zeros(num_rows)
        weight[first_rows(label_trajectories(group, traj_index))] = 1.0
    values = scores.detach().to("cpu", torch.float64).numpy()
    # The first row of a group is an entry also without cross_steps, being the first of its trajectory.
    origin = values[first_rows(group)] if num_rows else values

    def total(of: np.ndarray | None) -> np.ndarray:
        entries = weight if of is None else of if weight is None else of * weight
        return np.bincount(group, weights=entries)

    # Centred on the group's first entry: sums of equal scores are then exactly 0, and large offsets cost no digits.
    count = total(None).astype(np.int64)
    shifted = values - origin[group]
    mean_shift = total(shifted) / np.maximum(count, 1)
    squares = total((shifted - mean_shift[group]) ** 2)
    std = np.sqrt(squares / np.maximum(count - 1 if unbiased else count, 1))
    mean = origin + mean_shift
    alone = count == 1
    std[alone] = 1.0
    if singleton == "reference":
        mean[alone] = 0.0
    return tuple(torch.from_numpy(x[group]).to(scores.device) for x in (mean, std, count))  # type: ignore[return-value]


def suffix_sums(values: np.ndarray, segments: GroupIndex, gamma: float) -> np.ndarray:
    """``S_i = v_i + gamma S_next(i)``, where ``next(i)`` is the next row of the same segment: ``(B,)`` float64.

    Rows of a segment are in order but need not be contiguous. Computed by doubling (each pass joins sums over twice as
    many rows), so O(B log L) for segments of at most L rows, all in array operations.
    """
    label = dense_labels(segments)
    order = np.argsort(label, kind="stable")
    sums = np.asarray(values, dtype=np.float64)[order]
    if not len(sums):
        return sums
    sizes = np.bincount(label)
    ends = np.cumsum(sizes)
    rows_after = np.repeat(ends, sizes) - np.arange(len(sums)) - 1
    reach, power = 1, float(gamma)
    while reach < sizes.max():
        rows = np.flatnonzero(rows_after >= reach)
        sums[rows] += power * sums[rows + reach]
        reach, power = 2 * reach, power * power
    result = np.empty_like(sums)
    result[order] = sums
    return result
