# SPDX-License-Identifier: Apache-2.0
"""What a rollout returns, and how the generation batches of one training step become one rollout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agent_system.trajectory import Trajectory
from verl.protocol import DataProto

__all__ = ["RolloutResult", "merge_results"]

# Ratios, as opposed to counts and seconds. Those named are over turns, all others over episodes.
_RATIOS = ("episode/", "rollout/occupancy/")
_PER_ROW = ("episode/admissible_action_ratio", "episode/malformed_action_ratio")


@dataclass(frozen=True)
class RolloutResult:
    """One step's episodes."""

    batch: DataProto
    """One row per turn, ordered by episode, then turn."""
    episodes: list[Trajectory]
    metrics: dict[str, float]
    success: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Values per success key, one per episode that has the key; their means are columns of `batch`."""


def merge_results(parts: Sequence[RolloutResult], uids: Collection[str]) -> RolloutResult:
    """The groups `uids` of several generation batches as one rollout, in the order they were generated.

    Rows and episodes are those of the chosen groups. Metrics and the success columns are over everything that was
    played: the rate of the chosen groups alone would say nothing about the policy.

    Raises:
        ValueError: none of the parts holds one of the groups.
    """
    success = {
        key: np.concatenate([part.success[key] for part in parts if key in part.success])
        for key in dict.fromkeys(key for part in parts for key in part.success)
    }
    chosen = []
    for part in parts:
        keep = np.fromiter((uid in uids for uid in part.batch.non_tensor_batch["uid"]), bool, len(part.batch))
        if keep.any():
            rows = part.batch.select_idxs(keep)
            for key, values in success.items():
                rows.non_tensor_batch[key] = np.full(len(rows), float(values.mean()), dtype=object)
            chosen.append(rows)
    if not chosen:
        raise ValueError(f"no row belongs to one of the groups {sorted(uids)}")
    episodes = [episode for part in parts for episode in part.episodes if episode.uid in uids]
    return RolloutResult(DataProto.concat(chosen), episodes, _merge_metrics(parts, success), success)


def _merge_metrics(parts: Sequence[RolloutResult], success: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Counts and seconds are added, the longest episode counts, ratios are over all rows or all episodes."""
    logged = [part.metrics for part in parts]
    rates = {f"episode/{key}": float(values.mean()) for key, values in success.items()}
    names = [name for name in logged[0] if name not in rates]
    merged = {name: float(sum(metrics[name] for metrics in logged)) for name in names}
    merged["rollout/num_turns"] = max(metrics["rollout/num_turns"] for metrics in logged)
    for name in names:
        if name.startswith(_RATIOS):
            weight = "rollout/num_rows" if name in _PER_ROW else "rollout/num_episodes"
            merged[name] = sum(metrics[name] * metrics[weight] for metrics in logged) / merged[weight]
    return merged | rates
