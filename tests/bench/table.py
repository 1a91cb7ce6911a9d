# SPDX-License-Identifier: Apache-2.0
"""What every benchmark program shares: timing, a line about the machine, a Markdown table."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["environment_line", "format_seconds", "print_table", "time_best"]


def time_best(fn: Callable[[], Any], repeat: int = 5, min_time: float = 0.0) -> float:
    """Seconds of the fastest call of ``fn``: the least disturbed one, so that ratios of one run are steady.

    Garbage collection is off while ``fn`` runs. There is no warm-up call: the first of several calls is simply not the
    fastest.

    Args:
        fn: called without arguments; its result is dropped.
        repeat: at least this many calls.
        min_time: go on calling until this many seconds were spent in ``fn`` (for very short functions).
    """
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1, got {repeat}")
    best, spent, calls = float("inf"), 0.0, 0
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        while calls < repeat or spent < min_time:
            start = time.perf_counter()
            fn()
            seconds = time.perf_counter() - start
            best, spent, calls = min(best, seconds), spent + seconds, calls + 1
    finally:
        if was_enabled:
            gc.enable()
    return best


def environment_line(packages: Iterable[str] = ("torch", "numpy")) -> str:
    """One line for under a table: date, processor count, Python and the versions of ``packages``."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        cores = os.cpu_count() or 1
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} cores, {', '.join(versions)}"


def format_seconds(seconds: float) -> str:
    """``1.23 s``, ``4.56 ms`` or ``7.89 us``: three digits, in the unit a person would use."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table; text columns to the left, columns that hold only numbers (or times) to the right.

    Raises:
        ValueError: a row has another number of cells than the head.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells in a table of {len(headers)} columns: {row}")
    widths = [max(len(head), *(len(row[i]) for row in cells), 3) for i, head in enumerate(headers)]
    right = [bool(cells) and all(row[i][:1].isdigit() for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        return f"| {' | '.join(padded)} |"

    print(line(headers))
    print("|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|")
    for row in cells:
        print(line(row))
