# SPDX-License-Identifier: Apache-2.0
"""Statistics of several answers to each prompt, for code written for verl's single-turn validation.

The environments' own validation (``agent_system.multi_turn_rollout.validation``) has one value per episode and does not
need them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["bootstrap_metric", "calc_maj_val", "process_validation_metrics"]

ReduceFn = Callable[[Any], float]


def bootstrap_metric(
    data: Sequence[Any], subset_size: int, reduce_fns: Sequence[ReduceFn], n_bootstrap: int = 1000, seed: int = 42
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each reduction over ``n_bootstrap`` draws of ``subset_size`` entries.

    Entries are drawn with replacement from a generator of this call alone; all reductions see the same draws.
    """
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(data), size=(n_bootstrap, subset_size))
    subsets = [[data[index] for index in draw] for draw in draws.tolist()]
    results = [np.array([reduce(subset) for subset in subsets], dtype=np.float64) for reduce in reduce_fns]
    return [(float(values.mean()), float(values.std())) for values in results]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """``val_key`` of the first entry with the most frequent ``vote_key``; of equally frequent ones, the first seen."""
    winner = Counter(entry[vote_key] for entry in data).most_common(1)[0][0]
    return float(next(entry[val_key] for entry in data if entry[vote_key] == winner))


def _majority(pairs: Sequence[Mapping[str, Any]]) -> float:
    return calc_maj_val(pairs, "pred", "val")


def _subset_sizes(count: int) -> list[int]:
    """2, 4, 8, ... below ``count``, then ``count``."""
    sizes = []
    size = 2
    while size < count:
        sizes.append(size)
        size *= 2
    return [*sizes, count]


def _prompt_metrics(values: Sequence[float], votes: Sequence[Any] | None, seed: int) -> dict[str, float]:
    """``mean@n``, ``std@n`` and, for growing subsets, best, worst and (with votes) majority of one prompt's answers."""
    count = len(values)
    metrics = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(values))
    for size in _subset_sizes(count):
        best, worst = bootstrap_metric(values, size, [max, min], seed=seed)
        found = {"best": best, "worst": worst}
        if votes is not None:
            pairs = [{"val": value, "pred": vote} for value, vote in zip(values, votes, strict=True)]
            (found["maj"],) = bootstrap_metric(pairs, size, [_majority], seed=seed)
        for name, (mean, std) in found.items():
            metrics |= {f"{name}@{size}/mean": mean, f"{name}@{size}/std": std}
    return metrics


def process_validation_metrics(
    data_sources: Sequence[str], sample_inputs: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """``data source -> variable -> metric -> mean over its prompts``.

    Args:
        data_sources, sample_inputs: of every answer; equal prompts of a source form one group.
        infos_dict: variable -> one value an answer. Texts are no variables; ``pred`` holds the votes of ``maj@n``.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(data_sources, sample_inputs, strict=True)):
        groups[key].append(row)
    collected: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for (source, _), rows in groups.items():
        votes = [infos_dict["pred"][row] for row in rows] if "pred" in infos_dict else None
        for variable, column in infos_dict.items():
            values = [column[row] for row in rows]
            if isinstance(values[0], str):
                continue
            for name, value in _prompt_metrics(values, votes, seed).items():
                collected[source][variable][name].append(value)
    return {
        source: {
            variable: {name: float(np.mean(values)) for name, values in metrics.items()}
            for variable, metrics in variables.items()
        }
        for source, variables in collected.items()
    }
