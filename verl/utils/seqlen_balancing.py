# SPDX-License-Identifier: Apache-2.0
"""Splitting rows into parts of nearly equal token counts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from verl.utils.distributed import all_reduce_max

__all__ = [
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "rearrange_micro_batches",
]


def ceildiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(a // -b)


@dataclass(frozen=True)
class _Part:
    total: int
    items: tuple[int, ...]

    def order(self) -> tuple[int, int, tuple[int, ...]]:
        return (self.total, len(self.items), self.items)


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing method: k parts of row indices with nearly equal sums.

    Partial solutions (k parts each) are merged in pairs, always the two with the widest spread between their largest
    and smallest part, the largest part of one joining the smallest of the other. ``equal_size`` starts from solutions
    of k single rows, so every part ends with the same number of rows. Ties go by index: the result is a function of
    the lengths alone. Each merge sorts k parts: O(n k log(nk)).
    """
    by_length = sorted((length, index) for index, length in enumerate(seqlen_list))
    if equal_size:
        groups = [by_length[start : start + k_partitions] for start in range(0, len(by_length), k_partitions)]
    else:
        groups = [[item] for item in by_length]
    heap: list[tuple[int, tuple[tuple[int, int, tuple[int, ...]], ...], list[_Part]]] = []

    def push(parts: list[_Part]) -> None:
        parts.sort(key=_Part.order, reverse=True)
        spread = parts[0].total - parts[-1].total
        heapq.heappush(heap, (-spread, tuple((-p.total, -len(p.items), p.items) for p in parts), parts))

    for group in groups:
        parts = [_Part(length, (index,)) for length, index in group]
        push(parts + [_Part(0, ())] * (k_partitions - len(parts)))
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push([_Part(a.total + b.total, a.items + b.items) for a, b in zip(first, reversed(second))])
    return [sorted(part.items) for part in heap[0][2]]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """k lists of row indices, sorted inside each list, with nearly equal token sums and no list empty.

    Raises:
        ValueError: fewer rows than parts, or ``equal_size`` and the rows do not divide.
    """
    if len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} rows cannot fill {k_partitions} parts")
    if equal_size and len(seqlen_list) % k_partitions:
        raise ValueError(f"{len(seqlen_list)} rows do not divide into {k_partitions} equal parts")
    # A row of length 0 would let a part stay empty; every row counts as at least one token.
    return karmarkar_karp([max(1, int(length)) for length in seqlen_list], k_partitions, equal_size)


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Token sums per part before (rows in order) and after balancing, as metrics under ``prefix``."""
    parts = len(partitions)
    size = len(seqlen_list) // parts
    before = [sum(seqlen_list[part * size : (part + 1) * size]) for part in range(parts)]
    after = [sum(seqlen_list[index] for index in partition) for partition in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / parts,
    }


def rearrange_micro_batches(
    seqlen_list: Sequence[int], max_token_len: int, *, same_count_on_all_ranks: bool = True
) -> list[list[int]]:
    """Row indices of each micro-batch: none holds more than ``max_token_len`` tokens, and all hold a similar number.

    As few as the rows fit into when they are laid one after the other, longest first, where there is room; one more
    as long as equal shares of that many do not fit. All ranks take the largest count of any rank: every micro-batch is
    a round of collectives.

    Raises:
        ValueError: a row alone is over the budget, or this rank has fewer rows than the agreed count.
    """
    longest = max(seqlen_list)
    if longest > max_token_len:
        raise ValueError(f"a row of {longest} tokens is over the budget of {max_token_len} tokens per micro-batch")

    def agreed(count: int) -> int:
        together = same_count_on_all_ranks and dist.is_initialized()
        return all_reduce_max(count, torch.device("cpu")) if together else count

    count = agreed(_first_fit_count(seqlen_list, max_token_len))
    while True:
        parts = get_seqlen_balanced_partitions(seqlen_list, count, equal_size=False)
        fits = max(sum(seqlen_list[index] for index in part) for part in parts) <= max_token_len
        wanted = agreed(count if fits else count + 1)
        if wanted == count:
            return parts
        count = wanted


def _first_fit_count(lengths: Sequence[int], budget: int) -> int:
    """Number of micro-batches when each row, longest first, goes to the first one with room for it."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((number for number, left in enumerate(room) if left >= length), None)
        if place is None:
            room.append(budget - length)
        else:
            room[place] -= length
    return len(room)


def get_reverse_idx(idx_map: Sequence[int] | Sequence[Sequence[int]]) -> list[int]:
    """Positions that undo ``idx_map`` (a permutation, or lists that concatenate to one)."""
    flat = [index for entry in idx_map for index in (chain(entry) if isinstance(entry, Sequence) else (entry,))]
    reverse = [0] * len(flat)
    for position, index in enumerate(flat):
        reverse[index] = position
    return reverse
