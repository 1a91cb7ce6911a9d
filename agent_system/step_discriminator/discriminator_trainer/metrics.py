# SPDX-License-Identifier: Apache-2.0
"""How well predicted step credit agrees with labels. Pure functions on arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["auroc", "binary_metrics", "expected_calibration_error", "majority_credit"]

NUM_BINS = 10


def auroc(score: np.ndarray, positive: np.ndarray) -> float | None:
    """Probability that a random positive scores above a random negative, ties counting half (Mann-Whitney U).

    Args:
        score: (N,) float, higher means more likely positive.
        positive: (N,) bool.

    Returns:
        Value in [0, 1], or None without both classes.
    """
    positive = np.asarray(positive, dtype=bool)
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if num_positive == 0 or num_negative == 0:
        return None
    _, group, count = np.unique(np.asarray(score, dtype=np.float64), return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[group]  # mean rank of tied scores, from 1
    return float((rank[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def expected_calibration_error(credit: np.ndarray, label: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """Mean gap between P(necessary) and the share of necessary steps, over equal bins of P weighted by their rows.

    Args:
        credit: (N,) float in [0, 1]. label: (N,) 0 or 1. N >= 1.
    """
    credit, label = np.asarray(credit, dtype=np.float64), np.asarray(label, dtype=np.float64)
    bins = np.minimum((credit * num_bins).astype(np.int64), num_bins - 1)
    gap = np.bincount(bins, weights=credit - label, minlength=num_bins)
    return float(np.abs(gap).sum() / len(credit))


def binary_metrics(credit: np.ndarray, label: np.ndarray, threshold: float = 0.5) -> dict[str, float | int | None]:
    """Agreement of predicted credit with labels.

    Args:
        credit: (N,) float in [0, 1], P(necessary).
        label: (N,) 1 necessary, 0 redundant. N >= 1.
        threshold: credit below it predicts redundant.

    Returns:
        num_steps, redundant_share (of labels), accuracy, balanced_accuracy (mean recall of the two classes),
        f1_redundant, auroc, ece. A value that needs a class that is absent is None.
    """
    label = np.asarray(label)
    predicted, redundant = np.asarray(credit) < threshold, label == 0
    hits = int((predicted & redundant).sum())
    recalls = [
        float((predicted[redundant]).mean()) if redundant.any() else None,
        float((~predicted[~redundant]).mean()) if (~redundant).any() else None,
    ]
    both = [recall for recall in recalls if recall is not None]
    claimed = int(predicted.sum()) + int(redundant.sum())
    return {
        "num_steps": len(label),
        "redundant_share": float(redundant.mean()),
        "accuracy": float((predicted == redundant).mean()),
        "balanced_accuracy": sum(both) / 2 if len(both) == 2 else None,
        "f1_redundant": 2 * hits / claimed if claimed else None,
        "auroc": auroc(-np.asarray(credit, dtype=np.float64), redundant),
        "ece": expected_calibration_error(credit, label),
    }


def majority_credit(label: np.ndarray) -> np.ndarray:
    """(N,) float64 credit of the baseline that gives every step the more frequent label (necessary on a tie)."""
    label = np.asarray(label)
    return np.full(len(label), 1.0 if 2 * int(label.sum()) >= len(label) else 0.0)


def table(results: Mapping[str, Mapping[str, float | int | None]]) -> str:
    """Markdown table, one line per named result of `binary_metrics`."""
    columns = ["num_steps", "redundant_share", "accuracy", "balanced_accuracy", "f1_redundant", "auroc", "ece"]
    lines = ["| predictor | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, result in results.items():
        lines.append(f"| {name} | " + " | ".join(_cell(result[column]) for column in columns) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
