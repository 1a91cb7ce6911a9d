# SPDX-License-Identifier: Apache-2.0
"""One progress bar for the programs of this package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(label: str, *, total: int, initial: int = 0, show: bool = True) -> Iterator[Callable[[int], object]]:
    """Yield `advance(n)`. On a terminal a moving bar; elsewhere (a log file) a line every ten seconds."""
    if not show:
        yield lambda count: None
        return
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(total=total, initial=initial, desc=label, mininterval=interval, file=sys.stderr) as bar:
        yield bar.update
