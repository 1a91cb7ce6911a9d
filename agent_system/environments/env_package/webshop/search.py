# SPDX-License-Identifier: Apache-2.0
"""BM25 as Lucene computes it: an index of plain arrays, and the best products for a query.

Formulas: Robertson et al. 1994 with Lucene's forms, i.e. idf = ln(1 + (N - df + 0.5) / (df + 0.5)), no factor k1 + 1,
document lengths quantised to one byte, single precision; k1 = 0.9 and b = 0.4 are Anserini's defaults.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from agent_system.environments.env_package.webshop.analyzer import analyze

__all__ = ["MAX_HITS", "IndexBuilder", "SearchIndex", "quantised_length"]

MAX_HITS = 50
"""A search returns at most so many products."""

_K1, _B = np.float32(0.9), np.float32(0.4)
_EXACT_LENGTHS = 24  # lengths below are kept; above, four significant bits of what exceeds it

Arrays = dict[str, NDArray[np.generic]]


def quantised_length(length: int) -> int:
    """A document length (number of terms, >= 0) as Lucene's one-byte code gives it back: never more than it was."""
    if length < _EXACT_LENGTHS:
        return length
    rest = length - _EXACT_LENGTHS
    shift = max(rest.bit_length() - 4, 0)
    return _EXACT_LENGTHS + ((rest >> shift) << shift)


class IndexBuilder:
    """Collects documents in order and turns them into the arrays of a `SearchIndex`."""

    _CHUNK = 1 << 22

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._lengths: list[int] = []
        self._pending: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._chunks: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]] = []

    def add(self, text: str) -> None:
        """Add the next document."""
        terms = analyze(text)
        document = len(self._lengths)
        self._lengths.append(len(terms))
        ids, documents, counts = self._pending
        for term, count in Counter(terms).items():
            ids.append(self._ids.setdefault(term, len(self._ids)))
            documents.append(document)
            counts.append(min(count, 0xFFFF))
        if len(ids) >= self._CHUNK:
            self._flush()

    def build(self, asin_rank: NDArray[np.int32]) -> Arrays:
        """The index as arrays.

        Args:
            asin_rank: int32 (documents,), place of each document in the order of asins; ties follow it.
        """
        self._flush()
        terms = sorted(self._ids)
        place = np.empty(len(terms), np.int32)
        place[[self._ids[term] for term in terms]] = np.arange(len(terms), dtype=np.int32)
        chunks, self._chunks = self._chunks, []
        ids = np.concatenate([chunk[0] for chunk in chunks] or [np.empty(0, np.int32)])
        documents = np.concatenate([chunk[1] for chunk in chunks] or [np.empty(0, np.int32)])
        counts = np.concatenate([chunk[2] for chunk in chunks] or [np.empty(0, np.uint16)])
        ids = place[ids]
        order = np.argsort(ids, kind="stable")
        starts = np.searchsorted(ids, np.arange(len(terms) + 1), sorter=order).astype(np.int64)
        documents = documents[order]
        tail = (np.float32(1) + counts[order].astype(np.float32) * self._inverse_norms()[documents]).astype(np.float32)
        encoded = [term.encode("utf-8") for term in terms]
        return {
            "term_text": np.frombuffer(b"".join(encoded), np.uint8),
            "term_starts": np.cumsum([0] + [len(term) for term in encoded], dtype=np.int64),
            "posting_starts": starts,
            "posting_documents": documents.astype(np.int32),
            "posting_tails": tail,
            "asin_rank": asin_rank,
            "documents_with_text": np.array([sum(length > 0 for length in self._lengths)], np.int64),
        }

    def _flush(self) -> None:
        ids, documents, counts = self._pending
        if ids:
            self._chunks.append((np.array(ids, np.int32), np.array(documents, np.int32), np.array(counts, np.uint16)))
            self._pending = ([], [], [])

    def _inverse_norms(self) -> NDArray[np.float32]:
        """1 / (k1 (1 - b + b length / average length)) of every document."""
        lengths = np.array(self._lengths, np.int64)
        filled = max(int((lengths > 0).sum()), 1)
        average = np.float32(max(float(lengths.sum()), 1.0) / filled)
        known = {int(length): quantised_length(int(length)) for length in np.unique(lengths)}
        quantised = np.array([known[length] for length in self._lengths], np.float32)
        return (np.float32(1) / (_K1 * ((np.float32(1) - _B) + _B * quantised / average))).astype(np.float32)


@dataclass(frozen=True)
class SearchIndex:
    """The inverted index; arrays may be memory-mapped.

    Terms are sorted by their UTF-8 bytes: term t is `term_text[term_starts[t]:term_starts[t + 1]]`, and its postings
    are at `posting_starts[t]:posting_starts[t + 1]`: document numbers, and 1 + tf / norm ("tail") of each.
    """

    term_text: NDArray[np.uint8]
    term_starts: NDArray[np.int64]
    posting_starts: NDArray[np.int64]
    posting_documents: NDArray[np.int32]
    posting_tails: NDArray[np.float32]
    asin_rank: NDArray[np.int32]
    documents_with_text: int

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> SearchIndex:
        """Wrap what `IndexBuilder.build` returned."""
        rest = {name: arrays[name] for name in cls.names() if name != "documents_with_text"}
        return cls(**rest, documents_with_text=int(arrays["documents_with_text"][0]))  # type: ignore[arg-type]

    def search(self, query: str, limit: int = MAX_HITS) -> NDArray[np.int32]:
        """Documents for a query, best first, at most `limit`; equal scores are ordered by asin."""
        scores = np.zeros(len(self.asin_rank), np.float64)
        touched = False
        for term, count in Counter(analyze(query)).items():
            number = self._find(term.encode("utf-8"))
            if number < 0:
                continue
            start, end = int(self.posting_starts[number]), int(self.posting_starts[number + 1])
            df = end - start
            idf = np.float32(math.log(1.0 + (self.documents_with_text - df + 0.5) / (df + 0.5)))
            weight = np.float32(count) * idf
            scores[self.posting_documents[start:end]] += weight - weight / self.posting_tails[start:end]
            touched = True
        return self._best(scores.astype(np.float32), limit) if touched else np.empty(0, np.int32)

    def _find(self, term: bytes) -> int:
        """Number of a term, -1 if no document has it."""
        low, high = 0, len(self.term_starts) - 1
        while low < high:
            middle = (low + high) // 2
            found = self.term_text[self.term_starts[middle] : self.term_starts[middle + 1]].tobytes()
            if found == term:
                return middle
            low, high = (middle + 1, high) if found < term else (low, middle)
        return -1

    def _best(self, scores: NDArray[np.float32], limit: int) -> NDArray[np.int32]:
        found = np.flatnonzero(scores)
        if len(found) > limit:
            values = scores[found]
            threshold = np.partition(values, len(values) - limit)[len(values) - limit]
            found = found[values >= threshold]  # with all ties of the last place; the sort below decides
        order = np.lexsort((self.asin_rank[found], -scores[found]))
        return found[order][:limit].astype(np.int32)
