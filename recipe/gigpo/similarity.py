# SPDX-License-Identifier: Apache-2.0
"""Clusters of similar texts: the clusters of ``difflib.SequenceMatcher``, found without most of its work.

The plain way compares every text with the first member of every cluster, and each comparison costs up to the product of
the two lengths. Here

* texts are compared once per distinct text of a task (the caller passes distinct ones);
* counts of characters, pairs and triples bound the ratio from above, for all clusters in one array operation;
* the matcher stops as soon as the blocks found, or the characters left, decide on which side of the threshold it is.

All three are exact. For D distinct texts of one task and C clusters the cost is still O(D C) array rows, and O(D C)
comparisons where the bounds cannot tell texts apart; tasks are independent, so growth with their number is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

__all__ = ["are_similar", "group_similar"]

# Buckets that n-grams of characters are counted in. Two n-grams in one bucket only loosen a bound, never break it.
_BUCKETS = {1: 64, 2: 512, 3: 1024}


def are_similar(a: str, b: str, threshold: float = 0.95) -> bool:
    """``SequenceMatcher(None, a, b).ratio() >= threshold``.

    Raises:
        ValueError: something that is not text.
    """
    _require_text(a)
    _require_text(b)
    return _Representative(b).is_similar(a, threshold)


def group_similar(texts: Sequence[Any], tasks: np.ndarray, threshold: float) -> np.ndarray:
    """Cluster of each text, numbered in order of first appearance: ``(B,)`` int64.

    Texts are taken in order; each joins the first cluster of its task whose first member ``f`` has
    ``SequenceMatcher(None, text, f).ratio() >= threshold``, or starts a new one.

    Args:
        texts: preferably distinct within a task.
        tasks: ``(B,)`` int64; texts of different tasks are never compared.

    Raises:
        ValueError: a threshold outside (0, 1), or something that is not text.
    """
    if not 0.0 < threshold < 1.0:
        raise ValueError(f"similarity_thresh must lie between 0 and 1 (both excluded), got {threshold}")
    for text in texts:
        _require_text(text)
    first_member = np.empty(len(texts), dtype=np.int64)
    by_task = np.argsort(tasks, kind="stable")
    for rows in np.split(by_task, np.flatnonzero(np.diff(tasks[by_task])) + 1):
        clusters = _TaskClusters()
        for row in rows.tolist():
            first_member[row] = clusters.join(texts[row], threshold, row)
    return np.unique(first_member, return_inverse=True)[1]


def _require_text(value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(
            f"similarity grouping compares texts, but an observation is of type {type(value).__name__}; "
            "set algorithm.gigpo.enable_similarity=False"
        )


class _TaskClusters:
    """The clusters of one task so far, with the counts of their first members as rows of arrays."""

    def __init__(self) -> None:
        self._first_rows: list[int] = []
        self._representatives: list[_Representative] = []
        self._lengths = np.empty(0, dtype=np.int64)
        self._counts = {n: np.empty((0, buckets), dtype=np.int32) for n, buckets in _BUCKETS.items()}

    def join(self, text: str, threshold: float, row: int) -> int:
        """Row of the first member of the first similar cluster: an earlier one, or ``row``, which starts a new one."""
        counts = {n: _count_ngrams(text, n) for n in _BUCKETS}
        for number in self._possible(len(text), counts, threshold):
            if self._representatives[number].is_similar(text, threshold):
                return self._first_rows[number]
        self._append(text, counts, row)
        return row

    def _append(self, text: str, counts: dict[int, np.ndarray], row: int) -> None:
        used = len(self._first_rows)
        if used == len(self._lengths):
            size = max(8, 2 * used)
            self._lengths = np.resize(self._lengths, size)
            self._counts = {n: np.resize(rows, (size, rows.shape[1])) for n, rows in self._counts.items()}
        self._lengths[used] = len(text)
        for n, rows in self._counts.items():
            rows[used] = counts[n]
        self._first_rows.append(row)
        self._representatives.append(_Representative(text))

    def _possible(self, length: int, counts: dict[int, np.ndarray], threshold: float) -> list[int]:
        """Clusters that no bound rules out, in order.

        With M matched characters of T = both lengths, the ratio is 2 M / T. Each character of a match is common to both
        texts: M <= common characters. The matches are separated by at least one unmatched character, of which there are
        T - 2 M: at most T - 2 M + 1 matches, each with its length less n - 1 common n-grams. So
        ``common n-grams >= M - (n - 1) (T - 2 M + 1)``, that is ``M <= (common + (n - 1) (T + 1)) / (2 n - 1)``.
        """
        numbers = np.arange(len(self._first_rows))
        for n in _BUCKETS:
            if not len(numbers):
                break
            total = self._lengths[numbers] + length
            common = np.minimum(self._counts[n][numbers], counts[n]).sum(axis=1, dtype=np.int64)
            most = (common + (n - 1) * (total + 1)) // (2 * n - 1)
            with np.errstate(invalid="ignore"):
                ratio = np.where(total > 0, 2.0 * most / total, 1.0)
            numbers = numbers[ratio >= threshold]
        return list(map(int, numbers))


def _count_ngrams(text: str, n: int) -> np.ndarray:
    """How many n-grams of the text fall in each bucket: (buckets,) int32."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
    size = max(0, len(codes) - n + 1)
    mixed = np.zeros(size, dtype=np.int64)
    for offset in range(n):
        mixed = mixed * 1000003 + codes[offset : offset + size]
    return np.bincount(mixed % _BUCKETS[n], minlength=_BUCKETS[n]).astype(np.int32)


class _Representative:
    """The first member of a cluster, indexed once for all comparisons."""

    def __init__(self, text: str) -> None:
        self._length = len(text)
        self._matcher = SequenceMatcher(None, "", text)

    def is_similar(self, text: str, threshold: float) -> bool:
        """Whether the ratio of ``text`` to this one reaches the threshold, with as little matching as decides it.

        The ratio's matched characters are those of the longest match, and of the longest matches to its left and
        right, and so on. What is found so far is a lower bound; what the open pieces can still give is an upper one.
        """
        total = len(text) + self._length
        if total == 0:
            return True
        self._matcher.set_seq1(text)
        found, open_pieces = 0, [(0, len(text), 0, self._length)]
        possible = min(len(text), self._length)
        while open_pieces and 2.0 * (found + possible) / total >= threshold > 2.0 * found / total:
            piece = max(open_pieces, key=_size)
            open_pieces.remove(piece)
            a_low, a_high, b_low, b_high = piece
            possible -= _size(piece)
            a, b, size = self._matcher.find_longest_match(a_low, a_high, b_low, b_high)
            if size:
                found += size
                sides = [(a_low, a, b_low, b), (a + size, a_high, b + size, b_high)]
                open_pieces += [side for side in sides if _size(side)]
                possible += sum(map(_size, sides))
        return 2.0 * found / total >= threshold


def _size(piece: tuple[int, int, int, int]) -> int:
    """Most characters that can match inside a piece."""
    return min(piece[1] - piece[0], piece[3] - piece[2])
