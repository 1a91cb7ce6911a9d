# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of success rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["bootstrap_mean", "wilson_interval"]

_Z95 = 1.959963984540054


def wilson_interval(successes: float, total: int) -> tuple[float, float]:
    """95 % score interval (Wilson 1927) of a proportion of independent trials; (0, 1) without trials."""
    if total == 0:
        return 0.0, 1.0
    share = successes / total
    scale = 1.0 + _Z95**2 / total
    centre = (share + _Z95**2 / (2 * total)) / scale
    half = _Z95 * math.sqrt(share * (1.0 - share) / total + _Z95**2 / (4 * total**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_mean(values: Sequence[float], groups: Sequence[str], resamples: int = 2000) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values` when whole groups (tasks) are redrawn.

    Episodes of one task are not independent, so the task is the unit. The draws come from a fixed seed: equal input
    gives equal output.
    """
    names, index = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    if not len(names):
        return math.nan, math.nan
    sums = np.bincount(index, weights=np.asarray(values, dtype=np.float64), minlength=len(names))
    counts = np.bincount(index, minlength=len(names))
    draws = np.random.default_rng(0).integers(len(names), size=(resamples, len(names)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
