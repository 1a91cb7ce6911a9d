# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators. Each public function is pure; its registered form reads columns and config keys.

Shapes: ``B`` rows (one row is one turn of an episode), ``R`` response positions. Masks are ``(B, R)`` with 0/1. A row's
score is the sum of its ``token_level_rewards``. Functions return ``(advantages, returns)``, ``(B, R)`` float32.

Common arguments: ``index`` group keys, ``traj_index`` trajectory keys, ``compute_mean_std_cross_steps`` and
``singleton`` as in :func:`group_stats`, ``epsilon`` added to a standard deviation before dividing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.group_stats import (
    GroupIndex,
    Singleton,
    dense_labels,
    first_rows,
    group_stats,
    label_trajectories,
)
from verl.trainer.ppo.registry import register_adv_est

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.config.schema import AlgorithmConfig

__all__ = [
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "normalized_scores",
    "to_tokens",
]


# Numbers of a chunk: 1 MB in float32, which stays in a core's cache together with its mask.
CHUNK_SIZE = 2**18


def to_tokens(row_values: Tensor, response_mask: Tensor) -> Tensor:
    """One value per row, spread over its response tokens and 0 elsewhere: ``(B,)`` -> ``(B, R)`` float32."""
    zero = torch.zeros((), dtype=torch.float32, device=row_values.device)
    return torch.where(response_mask.bool(), row_values.float().unsqueeze(-1), zero)


def normalized_scores(
    scores: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    *,
    epsilon: float = 1e-6,
    by_std: bool = True,
    cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> Tensor:
    """``(s - mean_g) / (std_g + epsilon)``, or without the division: ``(B,)`` -> ``(B,)`` float64."""
    mean, std, _ = group_stats(scores, index, traj_index, cross_steps, singleton)
    centred = scores.double() - mean
    return centred / (std + epsilon) if by_std else centred


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    compute_mean_std_cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> tuple[Tensor, Tensor]:
    """GRPO (arXiv 2402.03300): ``A = (s - mean_g) / (std_g + epsilon)``, or without the division (arXiv 2503.20783).

    Groups without variance get 0. ``returns`` are the advantages (the same tensor).
    """
    normalized = normalized_scores(
        token_level_rewards.sum(dim=-1),
        index,
        traj_index,
        epsilon=epsilon,
        by_std=norm_adv_by_std_in_grpo,
        cross_steps=compute_mean_std_cross_steps,
        singleton=singleton,
    )
    advantages = to_tokens(normalized, response_mask)
    return advantages, advantages


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    compute_mean_std_cross_steps: bool = True,
) -> tuple[Tensor, Tensor]:
    """Pass@k (arXiv 2503.19595): the best of each group gets ``s_max - s_second``, everybody else 0.

    Divided by ``std_g + epsilon`` with ``norm_adv_by_std_in_grpo``. "The best" is one row, or, with
    ``compute_mean_std_cross_steps=False``, all turns of the best trajectory; of equals, the first. Counting rows means
    little with several turns: the two best rows are then mostly turns of one episode.

    Raises:
        ValueError: a group has one entry only.
    """
    scores = token_level_rewards.sum(dim=-1)
    group = dense_labels(index)
    entry = np.arange(len(group)) if compute_mean_std_cross_steps else label_trajectories(group, traj_index)
    _, std, count = group_stats(scores, group, entry, compute_mean_std_cross_steps)
    if bool((count < 2).any()):
        raise ValueError("grpo_passk compares the two best of a group, but a group has one entry; raise env.rollout.n")
    row = first_rows(entry)
    values = scores.double().cpu().numpy()[row]
    # Entries by group, the best ones first, equal ones in order.
    ranked = np.lexsort((-values, group[row]))
    best = np.flatnonzero(np.diff(group[row][ranked], prepend=-1))
    lead = np.zeros(len(row))
    lead[ranked[best]] = values[ranked[best]] - values[ranked[best + 1]]
    gain = torch.from_numpy(lead[entry]).to(scores.device)
    advantages = to_tokens(gain / (std + epsilon) if norm_adv_by_std_in_grpo else gain, response_mask)
    return advantages, advantages


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    epsilon: float = 1e-6,
    compute_mean_std_cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> tuple[Tensor, Tensor]:
    """RLOO (arXiv 2402.14740): the score minus the mean of the others, ``k / (k - 1) (s - mean_g)`` of k entries.

    ``epsilon`` is not read. ``returns`` are the advantages (the same tensor).
    """
    scores = token_level_rewards.sum(dim=-1)
    mean, _, count = group_stats(scores, index, traj_index, compute_mean_std_cross_steps, singleton)
    entries = count.double()
    scale = torch.where(count > 1, entries / (entries - 1.0).clamp(min=1.0), 1.0)
    advantages = to_tokens((scores.double() - mean) * scale, response_mask)
    return advantages, advantages


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    traj_index: GroupIndex | None = None,
    epsilon: float = 1e-6,
    compute_mean_std_cross_steps: bool = True,
    singleton: Singleton = "reference",
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): ``s - mean_g``, whitened over all tokens of the batch.

    ``epsilon`` is not read. ``returns`` are the advantages (the same tensor).

    Raises:
        ValueError: the batch has fewer than two response tokens.
    """
    scores = token_level_rewards.sum(dim=-1)
    mean, _, _ = group_stats(scores, index, traj_index, compute_mean_std_cross_steps, singleton)
    centred = scores.double() - mean
    # Every token of a row holds the row's value, so moments over tokens are moments over rows weighted by length.
    lengths = response_mask.sum(dim=-1).double()
    tokens = lengths.sum()
    if tokens < 2:
        raise ValueError(f"whitening needs at least two response tokens, the batch has {int(tokens)}")
    token_mean = (centred * lengths).sum() / tokens
    variance = ((centred - token_mean).square() * lengths).sum() / (tokens - 1)
    advantages = to_tokens((centred - token_mean) * torch.rsqrt(variance + 1e-8), response_mask)
    return advantages, advantages


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): the token return ``G_t = r_t + gamma G_{t+1}``, whitened over the batch.

    Positions outside the mask are skipped: they get 0 and pass the return of later tokens on unchanged.

    Returns:
        ``(whitened G, G)``, both 0 outside the mask.

    Raises:
        ValueError: the batch has fewer than two response tokens.
    """
    returns = _in_chunks(lambda r, m: _returns_to_go(r, m.bool(), gamma), token_level_rewards, response_mask)
    mean, scale = _whitening(returns, response_mask)

    def whitened(values: Tensor, mask: Tensor) -> Tensor:
        return _inside(values - mean, mask).mul_(scale)

    return _in_chunks(whitened, returns, response_mask), returns


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): the undiscounted token return minus the reward ``(B,)`` of a greedy response.

    Not a registered estimator: the baseline would be a greedy episode of each task, which the rollout does not play.
    """
    returns = _in_chunks(lambda r, m: _returns_to_go(r, m.bool(), 1.0), token_level_rewards, response_mask)
    return returns - to_tokens(reward_baselines, response_mask), returns


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float | Tensor, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv 1506.02438) over the tokens of each row: ``A_t = delta_t + gamma lam A_{t+1}``,
    ``delta_t = r_t + gamma V_{t+1} - V_t`` with V = 0 after the last position.

    Every position counts, padding too: rewards and values there should be 0. A turn is an episode of its own; nothing
    is bootstrapped from the next turn.

    Returns:
        ``(A whitened over the mask, A + V)``; neither is masked.

    Raises:
        ValueError: the batch has fewer than two response tokens.
    """
    gamma, lam = float(gamma), float(lam)

    def estimate(rewards: Tensor, values: Tensor) -> Tensor:
        following = torch.nn.functional.pad(values[:, 1:], (0, 1))
        return _discounted_from_the_right(rewards + gamma * following - values, gamma * lam)

    advantages = _in_chunks(estimate, token_level_rewards, values)
    mean, scale = _whitening(advantages, response_mask)
    return _in_chunks(lambda a: (a - mean).mul_(scale), advantages), advantages.add_(values)


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where the mask is set, 0 (never NaN) elsewhere."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def _in_chunks(function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """``function`` of all rows, many at a time: what it needs in between then stays in the processor's cache."""
    result = torch.empty(columns[0].shape, dtype=torch.float32, device=columns[0].device)
    for part, *given in _chunks(result, *columns):
        part.copy_(function(*given))
    return result


def _chunks(*columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, CHUNK_SIZE // max(1, columns[0].shape[-1]))
    yield from zip(*(column.split(rows) for column in columns))


def _whitening(values: Tensor, response_mask: Tensor) -> tuple[float, float]:
    """Mean and inverse standard deviation (``(var + 1e-8)^-1/2``, unbiased) of the values inside the mask."""
    count = int(response_mask.sum())
    if count < 2:
        raise ValueError(f"whitening needs at least two response tokens, the batch has {count}")
    chunks = list(_chunks(values, response_mask))
    mean = sum(float(_inside(v, m).sum(dim=-1).double().sum()) for v, m in chunks) / count
    # Of the differences, not of the squares: a small spread around a large mean would be lost.
    squares = [float(torch.linalg.vector_norm(_inside(v - mean, m), dim=-1).double().square().sum()) for v, m in chunks]
    return mean, (sum(squares) / (count - 1) + 1e-8) ** -0.5


def _returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + gamma G_next(t)``, ``next(t)`` the next position inside the mask; 0 outside. ``(B, R)``."""
    inside = _inside(rewards, mask)
    if not bool((mask[:, 1:] > mask[:, :-1]).any()):  # no row goes on after a gap: nothing has to be skipped
        return _discounted_from_the_right(inside, gamma)
    reward, kept = inside.t().contiguous(), mask.t().contiguous()
    result, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for position in range(len(reward) - 1, -1, -1):
        running = torch.where(kept[position], torch.add(reward[position], running, alpha=gamma), running)
        result[position] = running
    return _inside(result.t(), mask)


def _discounted_from_the_right(values: Tensor, discount: float, block: int = 64) -> Tensor:
    """``S_t = v_t + discount S_{t+1}`` along the last dimension, for all rows at once.

    Positions are cut into blocks: inside a block S is a matrix product, and from block to block the first sum of the
    next one is carried over. All memory is read in order, and the loop has R / block rounds.
    """
    num_rows, length = values.shape
    block = min(block, length)
    padded = torch.nn.functional.pad(values, (0, -length % block)) if length % block else values
    position = torch.arange(block, dtype=torch.float64, device=values.device)
    ahead = position[:, None] - position[None, :]
    base = torch.tensor(discount, dtype=torch.float64, device=values.device)
    weights = torch.where(ahead >= 0, base ** ahead.clamp(min=0), 0.0).to(values.dtype)
    sums = (padded.reshape(-1, block) @ weights).view(num_rows, -1, block)
    carried = (base ** (block - position)).to(values.dtype)
    for number in range(sums.shape[1] - 2, -1, -1):
        sums[:, number].addcmul_(sums[:, number + 1, :1], carried)
    return sums.view(num_rows, -1)[:, :length]


# ---------------------------------------------------------------------------------------------------------------------
# Registered forms


def _outcome_columns(batch: DataProto) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
    tensors, columns = tensors_of(batch), batch.non_tensor_batch
    return tensors["token_level_rewards"], tensors["response_mask"], columns["uid"], columns["traj_uid"]


def _group_options(config: AlgorithmConfig) -> dict[str, Any]:
    return {
        "compute_mean_std_cross_steps": config.compute_mean_std_cross_steps,
        "singleton": config.singleton_advantage,
    }


@register_adv_est("grpo")
def _grpo(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    by_std = config.norm_adv_by_std_in_grpo
    return compute_grpo_outcome_advantage(
        *_outcome_columns(batch), norm_adv_by_std_in_grpo=by_std, **_group_options(config)
    )


@register_adv_est("grpo_passk")
def _grpo_passk(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Always one entry per trajectory: with one per row every advantage of a multi-turn batch would be about 0."""
    return compute_grpo_passk_outcome_advantage(
        *_outcome_columns(batch),
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        compute_mean_std_cross_steps=False,
    )


@register_adv_est("rloo")
def _rloo(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    return compute_rloo_outcome_advantage(*_outcome_columns(batch), **_group_options(config))


@register_adv_est("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    return compute_reinforce_plus_plus_baseline_outcome_advantage(*_outcome_columns(batch), **_group_options(config))


@register_adv_est("reinforce_plus_plus")
def _reinforce_plus_plus(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    rewards, mask, _, _ = _outcome_columns(batch)
    return compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config.gamma)


@register_adv_est("gae", needs_critic=True)
def _gae(batch: DataProto, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    rewards, mask, _, _ = _outcome_columns(batch)
    return compute_gae_advantage_return(rewards, tensors_of(batch)["values"], mask, config.gamma, config.lam)
