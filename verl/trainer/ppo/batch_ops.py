# SPDX-License-Identifier: Apache-2.0
"""What happens to a step's batch between the rollout and the update: masks, penalties, padding, balancing.

One row is one turn of an episode. ``B`` rows, ``P`` prompt and ``R`` response positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.group_stats import factorize, suffix_sums
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance

if TYPE_CHECKING:
    from verl.trainer.config.schema import AlgorithmConfig, PPOConfig

# Columns that say what the update learns from; zero on rows that only fill up a batch.
LEARNING_COLUMNS = ("response_mask", "advantages", "returns", "token_level_rewards", "token_level_scores")


def compute_response_mask(data: DataProto) -> Tensor:
    """``attention_mask[:, -R:]``: 1 on sampled tokens up to and including the first EOS, ``(B, R)`` int64."""
    tensors = tensors_of(data)
    mask: Tensor = tensors["attention_mask"][:, -tensors["responses"].shape[-1] :]
    return mask


def last_token_positions(response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """``(rows, columns)`` of the last response token of every row that has one."""
    lengths = response_mask.sum(dim=-1)
    rows = torch.nonzero(lengths > 0).squeeze(-1)
    return rows, lengths[rows].long() - 1


def apply_invalid_action_penalty(
    data: DataProto, invalid_action_penalty_coef: float
) -> tuple[DataProto, dict[str, float]]:
    """Subtract ``coef`` once from every row whose action was invalid, and log how many were valid.

    It goes to ``token_level_scores`` at the last response token and to ``step_rewards`` where that column exists.
    The environment's own ``rewards`` and ``episode_rewards`` stay as they are. ``token_level_scores`` is replaced, not
    changed in place.
    """
    valid = torch.as_tensor(data.non_tensor_batch["is_action_valid"].astype(np.float32))
    penalty = invalid_action_penalty_coef * (1.0 - valid)
    tensors = tensors_of(data)
    scores = tensors["token_level_scores"].clone()
    rows, columns = last_token_positions(tensors["response_mask"])
    scores[rows, columns] -= penalty[rows]
    tensors["token_level_scores"] = scores
    if "step_rewards" in tensors:
        tensors["step_rewards"] = tensors["step_rewards"] - penalty
    return data, {
        "episode/valid_action_ratio": valid.mean().item(),
        "episode/invalid_action_penalty": penalty.mean().item(),
    }


def apply_kl_penalty(
    data: DataProto, kl_ctrl: core_algos.FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """``token_level_rewards = token_level_scores - beta * KL(old, ref) * mask``; then move the controller.

    ``beta`` is the controller's value before it is updated with the batch's mean KL (mean over rows of each row's
    mean over tokens) and ``n_steps = B``.
    """
    tensors = tensors_of(data)
    mask = tensors["response_mask"].float()
    kl = core_algos.kl_penalty(tensors["old_log_probs"], tensors["ref_log_prob"], kl_penalty) * mask
    beta = kl_ctrl.value
    tensors["token_level_rewards"] = tensors["token_level_scores"] - beta * kl
    mean_kl = (kl.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)).mean().item()
    kl_ctrl.update(mean_kl, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": beta}


def compute_step_returns(data: DataProto, gamma: float) -> Tensor:
    """Discounted return of each turn, ``R_t = r_t + gamma R_{t+1}`` within a trajectory: ``(B,)`` float32.

    Reads ``rewards`` and ``traj_uid``; rows of a trajectory must be in turn order (they need not be contiguous).
    """
    columns = data.non_tensor_batch
    returns = suffix_sums(columns["rewards"].astype(np.float64), columns["traj_uid"], gamma)
    return torch.from_numpy(returns.astype(np.float32))


def add_to_last_reward(data: DataProto, change: Tensor, gamma: float) -> None:
    """Make ``step_rewards`` those of a rollout whose last turns had earned ``change`` more.

    A turn that is n turns before its trajectory's last gets ``gamma^n change``. The environment's own ``rewards`` stay.

    Args:
        change: ``(B,)``, the same for all rows of a trajectory.
    """
    columns, tensors = data.non_tensor_batch, tensors_of(data)
    trajectory = factorize(columns["traj_uid"])
    turn = columns["step_index"].astype(np.int64)
    last = np.zeros(len(turn), dtype=np.int64)
    np.maximum.at(last, trajectory, turn)
    discount = torch.from_numpy(float(gamma) ** (last[trajectory] - turn))
    tensors["step_rewards"] = tensors["step_rewards"] + (discount * change.double()).float()


def compute_advantage(
    data: DataProto, adv_estimator: str, config: AlgorithmConfig, metrics: dict[str, Any] | None = None
) -> DataProto:
    """Add ``advantages`` and ``returns`` (``(B, R)`` float32) of the registered estimator.

    Args:
        metrics: receives what the estimator wants logged.

    Raises:
        UserError: the estimator is not registered.
        ValueError: it returned a wrong shape.
    """
    estimator = core_algos.get_adv_estimator(adv_estimator)
    advantages, returns, *logged = estimator(data, config)
    if metrics is not None:
        for values in logged:
            metrics.update(values)
    tensors = tensors_of(data)
    shape = tensors["response_mask"].shape
    if advantages.shape != shape or returns.shape != shape:
        raise ValueError(f"estimator {adv_estimator!r} returned {tuple(advantages.shape)}, expected {tuple(shape)}")
    tensors["advantages"] = advantages.float()
    # Two tensors in any case: hooks may edit the advantages in place.
    tensors["returns"] = returns.clone() if returns is advantages else returns.float()
    return data


def pad_with_masked_rows(data: DataProto, divisor: int) -> tuple[DataProto, int]:
    """Append rows without learning signal until ``len(data)`` is a multiple of ``divisor``.

    The rows are copies of the shortest row (so they cost little) with a zero response mask, zero advantages and
    zero rewards: neither loss nor gradient changes.

    Returns:
        ``(padded batch, number of added rows)``; the same object when nothing is missing.
    """
    missing = -len(data) % divisor
    if missing == 0:
        return data, 0
    shortest = int(tensors_of(data)["attention_mask"].sum(dim=-1).argmin())
    filler = data.select_idxs(torch.full((missing,), shortest, dtype=torch.int64))
    tensors = tensors_of(filler)
    for name in LEARNING_COLUMNS:
        if name in tensors:
            tensors[name] = torch.zeros_like(tensors[name])
    return DataProto.concat([data, filler]), missing


def duplicate_rows(data: DataProto, divisor: int, rng: np.random.Generator) -> tuple[DataProto, int]:
    """Append copies of random rows until ``divisor`` divides the batch (the reference's order and statistics).

    Rows are drawn without replacement, cycling through fresh permutations when more are missing than there are.
    """
    missing = -len(data) % divisor
    if missing == 0:
        return data, 0
    rounds = math.ceil(missing / len(data))
    drawn = np.concatenate([rng.permutation(len(data)) for _ in range(rounds)])[:missing]
    return DataProto.concat([data, data.select_idxs(torch.from_numpy(drawn))]), missing


def reference_divisor(config: PPOConfig, world_size: int, uses_reference: bool) -> int:
    """Number of rows the reference pads to: lcm of every micro-batch size times the number of ranks."""
    actor_rollout_ref = config.actor_rollout_ref
    micro = [actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu]
    micro.append(actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu)
    if uses_reference:
        micro.append(actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu)
    return math.lcm(world_size, *(size * world_size for size in micro if size is not None))


def balance_batch(data: DataProto, world_size: int) -> dict[str, float]:
    """Reorder rows in place so that each rank's equal share has a similar number of tokens.

    Returns ``global_seqlen/*`` metrics. From here on the row order is arbitrary.
    """
    lengths = tensors_of(data)["attention_mask"].sum(dim=-1).tolist()
    partitions = get_seqlen_balanced_partitions(lengths, k_partitions=world_size, equal_size=True)
    data.reorder(torch.tensor([row for part in partitions for row in sorted(part)]))
    return log_seqlen_unbalance(lengths, partitions, prefix="global_seqlen")
