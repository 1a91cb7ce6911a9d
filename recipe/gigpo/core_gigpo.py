# SPDX-License-Identifier: Apache-2.0
"""GiGPO (arXiv 2505.10978): groups of steps taken from the same state, and the advantages built on them.

``A = A_episode + w A_step``. The episode part is GRPO's. The step part compares the discounted return of each step with
those of the steps that members of its group took from the same observation ("anchor").

Shapes: ``B`` rows (one row is one turn of an episode), ``R`` response positions; masks are ``(B, R)`` with 0/1.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from recipe.gigpo.similarity import are_similar, group_similar
from verl.trainer.ppo.advantages import normalized_scores, to_tokens
from verl.trainer.ppo.batch_ops import compute_step_returns
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.group_stats import GroupIndex, Singleton, combine_labels, dense_labels, factorize, first_rows

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.config.schema import AlgorithmConfig

__all__ = [
    "MODES",
    "are_similar",
    "build_step_group",
    "compute_gigpo_outcome_advantage",
    "compute_step_discounted_returns",
    "episode_norm_reward",
    "gigpo_of_batch",
    "step_norm_reward",
    "summarize_group_size",
    "to_hashable",
]

logger = logging.getLogger(__name__)

MODES = ("mean_norm", "mean_std_norm")


def to_hashable(x: Any) -> Hashable:
    """A value that is equal for equal observations: arrays and lists as (nested) tuples, dicts by sorted key.

    Raises:
        TypeError: something that can be neither hashed nor taken apart.
    """
    if isinstance(x, np.ndarray):
        return tuple(x.ravel().tolist())
    if isinstance(x, list | tuple):
        return tuple(to_hashable(item) for item in x)
    if isinstance(x, Mapping):
        return tuple(sorted((key, to_hashable(value)) for key, value in x.items()))
    if isinstance(x, Hashable):
        return x
    raise TypeError(f"an observation of type {type(x).__name__} cannot be compared with others")


def observation_labels(anchor_obs: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Number equal observations with equal integers: ``(B,)`` int64. O(B) for texts, O(total size) for arrays."""
    values = list(anchor_obs)
    all_text = set(map(type, values)) <= {str}
    return factorize(values if all_text else [to_hashable(obs) for obs in values])


def build_step_group(
    anchor_obs: Sequence[Any] | np.ndarray,
    index: GroupIndex,
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    summarize: bool = False,
) -> np.ndarray:
    """Number the step groups in order of first appearance: ``(B,)`` int64.

    Rows of one group (``index``) with the same observation belong together. With ``enable_similarity`` each row joins
    the first cluster whose first member is similar enough (:func:`recipe.gigpo.similarity.group_similar`).

    Args:
        summarize: log the group sizes.

    Raises:
        ValueError: ``enable_similarity`` with a threshold outside (0, 1) or observations other than text.
    """
    tasks, observations = dense_labels(index), observation_labels(anchor_obs)
    groups = combine_labels(tasks, observations)
    if enable_similarity:
        # Rows with the same text of the same task always end in the same cluster, so only the first of them counts.
        first = first_rows(groups)
        clusters = group_similar([anchor_obs[row] for row in first], tasks[first], similarity_thresh)
        groups = clusters[groups]
    if summarize:
        logger.info("step groups: %s", summarize_group_size(np.bincount(groups)))
    return groups


def summarize_group_size(group_size: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Of the sizes of all step groups: their number, mean, maximum, and the share of rows that are alone."""
    sizes = np.asarray(group_size, dtype=np.int64)
    if not sizes.size:
        return {"count": 0.0, "mean": 0.0, "max": 0.0, "singleton_ratio": 0.0}
    return {
        "count": float(len(sizes)),
        "mean": float(sizes.mean()),
        "max": float(sizes.max()),
        "singleton_ratio": float((sizes == 1).sum() / sizes.sum()),
    }


def compute_step_discounted_returns(batch: DataProto, gamma: float) -> Tensor:
    """Discounted return of each turn, ``(B,)`` float32 (:func:`verl.trainer.ppo.batch_ops.compute_step_returns`)."""
    return compute_step_returns(batch, gamma)


def episode_norm_reward(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    epsilon: float = 1e-6,
    remove_std: bool = True,
    compute_mean_std_cross_steps: bool = True,
) -> Tensor:
    """The episode part: GRPO's advantage, ``(B, R)``; without the division when ``remove_std``."""
    scores = token_level_rewards.sum(dim=-1)
    cross = compute_mean_std_cross_steps
    row_values = normalized_scores(scores, index, traj_index, epsilon=epsilon, by_std=not remove_std, cross_steps=cross)
    return to_tokens(row_values, response_mask)


def step_norm_reward(
    step_rewards: Tensor, response_mask: Tensor, index: GroupIndex, epsilon: float = 1e-6, remove_std: bool = True
) -> Tensor:
    """The step part: return minus the step group's mean (divided by its std), ``(B, R)``; 0 in a group of one.

    Args:
        step_rewards: ``(B,)``.
        index: ``(B,)`` step groups of :func:`build_step_group`.
    """
    return to_tokens(_step_values(step_rewards, index, epsilon, remove_std), response_mask)


def _step_values(step_rewards: Tensor, groups: GroupIndex, epsilon: float, remove_std: bool) -> Tensor:
    return normalized_scores(step_rewards, groups, epsilon=epsilon, by_std=not remove_std, singleton="zero")


def compute_gigpo_outcome_advantage(
    token_level_rewards: Tensor,
    step_rewards: Tensor,
    response_mask: Tensor,
    anchor_obs: Sequence[Any] | np.ndarray,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    epsilon: float = 1e-6,
    step_advantage_w: float = 1.0,
    mode: str = "mean_norm",
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    compute_mean_std_cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> tuple[Tensor, Tensor]:
    """``A_episode + step_advantage_w A_step`` on the response tokens: ``(B, R)`` float32, given twice.

    Args:
        step_rewards: ``(B,)`` discounted return of each turn.
        mode: ``mean_std_norm`` divides both parts by the standard deviation of their group, ``mean_norm`` neither.
        compute_mean_std_cross_steps, singleton: of the episode part; with ``step_advantage_w=0`` the result is GRPO's.

    Raises:
        ValueError: unknown mode; see also :func:`build_step_group`.
    """
    tasks = dense_labels(index)
    groups = build_step_group(anchor_obs, tasks, enable_similarity, similarity_thresh)
    return _joint_advantage(
        token_level_rewards, step_rewards, response_mask, groups, tasks, traj_index, epsilon=epsilon,
        step_advantage_w=step_advantage_w, mode=mode, cross_steps=compute_mean_std_cross_steps, singleton=singleton,
    )  # fmt: skip


def _joint_advantage(
    token_level_rewards: Tensor,
    step_rewards: Tensor,
    response_mask: Tensor,
    groups: np.ndarray,
    tasks: np.ndarray,
    traj_index: GroupIndex | None,
    *,
    epsilon: float,
    step_advantage_w: float,
    mode: str,
    cross_steps: bool,
    singleton: Singleton,
) -> tuple[Tensor, Tensor]:
    remove_std = _removes_std(mode)
    scores = token_level_rewards.sum(dim=-1)
    joint = normalized_scores(
        scores, tasks, traj_index, epsilon=epsilon, by_std=not remove_std, cross_steps=cross_steps, singleton=singleton
    )
    if step_advantage_w != 0:
        joint = joint + step_advantage_w * _step_values(step_rewards, groups, epsilon, remove_std)
    advantages = to_tokens(joint, response_mask)
    return advantages, advantages


def _removes_std(mode: str) -> bool:
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown (known: {', '.join(MODES)})")
    return mode == "mean_norm"


def gigpo_of_batch(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The registered estimator: reads ``token_level_rewards, step_rewards, response_mask, anchor_obs, uid, traj_uid``.

    Metrics: ``gigpo/step_group_size/{mean,max}``, ``gigpo/step_group_count`` and ``gigpo/singleton_step_ratio``, the
    share of rows whose step part is 0 because no other row has their observation.
    """
    tensors, columns, options = tensors_of(batch), batch.non_tensor_batch, config.gigpo
    tasks = dense_labels(columns["uid"])
    groups = build_step_group(columns["anchor_obs"], tasks, options.enable_similarity, options.similarity_thresh)
    sizes = summarize_group_size(np.bincount(groups))
    metrics = {
        "gigpo/step_group_size/mean": sizes["mean"],
        "gigpo/step_group_size/max": sizes["max"],
        "gigpo/step_group_count": sizes["count"],
        "gigpo/singleton_step_ratio": sizes["singleton_ratio"],
    }
    advantages, returns = _joint_advantage(
        tensors["token_level_rewards"], tensors["step_rewards"], tensors["response_mask"], groups,
        tasks, columns["traj_uid"], epsilon=1e-6, step_advantage_w=options.step_advantage_w,
        mode=options.mode, cross_steps=config.compute_mean_std_cross_steps, singleton=config.singleton_advantage,
    )  # fmt: skip
    return advantages, returns, metrics
