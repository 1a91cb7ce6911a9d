# SPDX-License-Identifier: Apache-2.0
"""HGPO (arXiv 2602.22817): a step is compared with those that share its last observations, for every length of history.

``H`` is the number of past steps that count. A row at turn ``t`` belongs to one group for each ``k`` in
``1 .. min(H + 1, t + 1)``: the rows of its task whose last k observations (the current one included) are the same.
Its advantage is the mean of those against the groups, weighted by ``(k + 1) ** length_weight_alpha``.

Shapes: ``B`` rows (one row is one turn of an episode), ``R`` response positions; masks are ``(B, R)`` with 0/1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recipe.gigpo.core_gigpo import MODES, compute_step_discounted_returns, observation_labels
from verl.trainer.ppo.advantages import normalized_scores, to_tokens
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.group_stats import GroupIndex, Singleton, combine_labels, dense_labels, group_stats

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.config.schema import AlgorithmConfig

__all__ = [
    "compute_hgpo_outcome_advantage",
    "compute_step_discounted_returns",
    "hgpo_advantage_estimate",
    "hgpo_of_batch",
    "history_groups",
]


def history_groups(
    anchor_obs: Sequence[Any] | np.ndarray,
    index: GroupIndex,
    traj_index: GroupIndex,
    history_length: int,
    turn_index: Sequence[int] | np.ndarray | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For k = 1, 2, ..., H + 1: ``(rows, groups)``, the rows with at least k - 1 turns before them and their groups.

    Args:
        history_length: H; below 1 only the current observation counts.
        turn_index: ``(B,)`` turn of each row in its trajectory; None counts the rows of a trajectory in batch order.
            Copies of a row (same trajectory, same turn) are harmless.

    Raises:
        ValueError: a row's earlier turn is missing from the batch.
    """
    observation, trajectory = observation_labels(anchor_obs), dense_labels(traj_index)
    turn = _turns(trajectory) if turn_index is None else np.asarray(turn_index, dtype=np.int64)
    width = int(turn.max()) + 1 if len(turn) else 0
    place = trajectory * width + turn
    seen_at = np.full((int(trajectory.max()) + 1) * width if len(turn) else 0, -1, dtype=np.int64)
    seen_at[place] = observation
    rows, groups = np.arange(len(turn)), combine_labels(dense_labels(index), observation)
    levels = [(rows, groups)]
    for back in range(1, max(history_length, 0) + 1):
        kept = turn[rows] >= back
        rows = rows[kept]
        if not len(rows):
            break
        earlier = seen_at[place[rows] - back]
        if (earlier < 0).any():
            raise ValueError("hgpo needs whole trajectories: a turn before one of the rows is not in the batch")
        groups = combine_labels(groups[kept], earlier)
        levels.append((rows, groups))
    return levels


def _turns(trajectory: np.ndarray) -> np.ndarray:
    """How many rows of the same trajectory come before each row."""
    order = np.argsort(trajectory, kind="stable")
    sizes = np.bincount(trajectory)
    turns = np.empty(len(trajectory), dtype=np.int64)
    turns[order] = np.arange(len(trajectory)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return turns


def compute_hgpo_outcome_advantage(
    token_level_rewards: Tensor,
    step_rewards: Tensor,
    response_mask: Tensor,
    anchor_obs: Sequence[Any] | np.ndarray,
    index: GroupIndex,
    traj_index: GroupIndex,
    history_length: int,
    epsilon: float = 1e-6,
    mode: str = "mean_std_norm",
    length_weight_alpha: float = 1.0,
    base_group: bool = False,
    *,
    turn_index: Sequence[int] | np.ndarray | None = None,
    compute_mean_std_cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> tuple[Tensor, Tensor]:
    """:func:`hgpo_advantage_estimate` on the response tokens: ``(B, R)`` float32, given twice."""
    advantages = hgpo_advantage_estimate(
        token_level_rewards, step_rewards, response_mask, anchor_obs, index, traj_index, history_length, epsilon, mode,
        length_weight_alpha, base_group, turn_index=turn_index,
        compute_mean_std_cross_steps=compute_mean_std_cross_steps, singleton=singleton,
    )  # fmt: skip
    return advantages, advantages


def hgpo_advantage_estimate(
    token_level_rewards: Tensor,
    step_rewards: Tensor,
    response_mask: Tensor,
    anchor_obs: Sequence[Any] | np.ndarray,
    index: GroupIndex,
    traj_index: GroupIndex,
    history_length: int,
    epsilon: float = 1e-6,
    mode: str = "mean_std_norm",
    length_weight_alpha: float = 1.0,
    base_group: bool = False,
    *,
    turn_index: Sequence[int] | np.ndarray | None = None,
    compute_mean_std_cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> Tensor:
    """Weighted mean over histories of length k of ``a_k = r - mean`` or ``(r - mean) / (std + epsilon)``: ``(B, R)``.

    ``r`` is the step return, mean and (biased) std are the history group's. Histories with ``a_k = 0`` (a group of one
    among them) have no weight; a row with none at all gets 0.

    Args:
        step_rewards: ``(B,)`` discounted return of each turn.
        mode: ``mean_norm`` leaves out the division, in the base group too.
        base_group: adds k = 0, the whole task: GRPO's advantage of the row (unbiased std).
        turn_index: see :func:`history_groups`.
        compute_mean_std_cross_steps, singleton: of the base group.

    Raises:
        ValueError: unknown mode; see also :func:`history_groups`.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown (known: {', '.join(MODES)})")
    by_std = mode == "mean_std_norm"
    returns = step_rewards.detach().double().cpu()
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    if base_group:
        total += normalized_scores(
            token_level_rewards.sum(dim=-1).cpu(), index, traj_index, epsilon=epsilon, by_std=by_std,
            cross_steps=compute_mean_std_cross_steps, singleton=singleton,
        )  # fmt: skip
        weights += (total != 0).double()
    for number, (rows, groups) in enumerate(history_groups(anchor_obs, index, traj_index, history_length, turn_index)):
        chosen = torch.from_numpy(rows)
        values = returns[chosen]
        mean, std, _ = group_stats(values, groups, singleton="zero", unbiased=False)
        advantage = (values - mean) / (std + epsilon) if by_std else values - mean
        weight = float(number + 2) ** length_weight_alpha
        total[chosen] += weight * advantage
        weights[chosen] += weight * (advantage != 0)
    combined = torch.where(weights > 0, total / (weights + 1e-6), 0.0)
    return to_tokens(combined.to(response_mask.device), response_mask)


def hgpo_of_batch(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The registered estimator: reads ``token_level_rewards, step_rewards, response_mask, anchor_obs, uid, traj_uid``
    and ``step_index``; H is ``algorithm.hgpo.history_length``, which is ``env.history_length``."""
    tensors, columns, options = tensors_of(batch), batch.non_tensor_batch, config.hgpo
    return compute_hgpo_outcome_advantage(
        tensors["token_level_rewards"], tensors["step_rewards"], tensors["response_mask"], columns["anchor_obs"],
        columns["uid"], columns["traj_uid"], options.history_length, mode=options.mode,
        length_weight_alpha=options.length_weight_alpha, base_group=options.base_group,
        turn_index=columns["step_index"], compute_mean_std_cross_steps=config.compute_mean_std_cross_steps,
        singleton=config.singleton_advantage,
    )  # fmt: skip
