# SPDX-License-Identifier: Apache-2.0
"""Penalties, KL in the reward, padding and balancing of a step's batch, and the metrics computed from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.config.schema import AlgorithmConfig
from verl.trainer.ppo import batch_ops, core_algos, metric_utils

PROMPT, RESPONSE = 4, 3


def make_batch(lengths: list[int], scores: list[float] | None = None, valid: list[bool] | None = None) -> DataProto:
    """One row per entry of `lengths` (response tokens); rows 2k and 2k+1 are turns of trajectory k."""
    rows = len(lengths)
    mask = torch.zeros(rows, PROMPT + RESPONSE, dtype=torch.int64)
    mask[:, 1:PROMPT] = 1
    score = torch.zeros(rows, RESPONSE)
    for row, length in enumerate(lengths):
        mask[row, PROMPT : PROMPT + length] = 1
        if length:
            score[row, length - 1] = (scores or [0.0] * rows)[row]
    tensors = {
        "responses": torch.arange(rows * RESPONSE).reshape(rows, RESPONSE),
        "attention_mask": mask,
        "response_mask": mask[:, PROMPT:],
        "token_level_scores": score,
        "token_level_rewards": score,
        "advantages": score + 1.0,
        "returns": score,
    }
    traj = [f"t{row // 2}" for row in range(rows)]
    arrays = {
        "uid": ["g"] * rows,
        "traj_uid": traj,
        "rewards": [1.0] * rows,
        "is_action_valid": valid or [True] * rows,
        "episode_rewards": [float(row // 2) for row in range(rows)],
        "episode_lengths": [2.0] * rows,
        "success_rate": [0.25] * rows,
    }
    return DataProto.from_dict(tensors, {k: np.array(v, dtype=object) for k, v in arrays.items()})


def test_response_mask_is_the_tail_of_the_attention_mask() -> None:
    batch = make_batch([3, 1])
    assert batch_ops.compute_response_mask(batch).tolist() == [[1, 1, 1], [1, 0, 0]]


def test_penalty_hits_each_invalid_turn_once_at_its_last_token() -> None:
    batch = make_batch([3, 1, 2, 0], scores=[10.0, 10.0, 0.0, 0.0], valid=[True, False, False, False])
    before = batch.batch["token_level_scores"].clone()
    rewards = batch.batch["token_level_rewards"]
    batch.batch["step_rewards"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    _, metrics = batch_ops.apply_invalid_action_penalty(batch, 0.1)
    change = batch.batch["token_level_scores"] - before
    expected = torch.tensor([[0, 0, 0], [-0.1, 0, 0], [0, -0.1, 0], [0, 0, 0]])
    torch.testing.assert_close(change, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(batch.batch["step_rewards"], torch.tensor([1.0, 1.9, 2.9, 3.9]))
    torch.testing.assert_close(rewards, before)
    assert batch.non_tensor_batch["rewards"].tolist() == [1.0] * 4
    assert metrics["episode/valid_action_ratio"] == pytest.approx(0.25)


def test_kl_in_reward_uses_the_coefficient_before_its_update() -> None:
    batch = make_batch([3, 1], scores=[1.0, 2.0])
    batch.batch["old_log_probs"] = torch.full((2, RESPONSE), -1.0)
    batch.batch["ref_log_prob"] = torch.full((2, RESPONSE), -1.5)
    controller = core_algos.AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
    _, metrics = batch_ops.apply_kl_penalty(batch, controller, "kl")
    expected = torch.tensor([[-0.05, -0.05, 0.95], [1.95, 0.0, 0.0]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert metrics == pytest.approx({"actor/reward_kl_penalty": 0.5, "actor/reward_kl_penalty_coeff": 0.1})
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_step_returns_restart_at_each_trajectory() -> None:
    batch = make_batch([1, 1, 1, 1])
    batch.non_tensor_batch["rewards"] = np.array([0.0, 10.0, 1.0, 0.0], dtype=object)
    got = batch_ops.compute_step_returns(batch, 0.95)
    assert got.dtype == torch.float32 and got.tolist() == pytest.approx([9.5, 10.0, 1.0, 0.0])


def test_padding_rows_teach_nothing_and_come_last() -> None:
    batch = make_batch([3, 1, 2], scores=[1.0, 2.0, 3.0])
    padded, added = batch_ops.pad_with_masked_rows(batch, 4)
    assert (len(padded), added) == (4, 1)
    assert padded.batch["response_mask"][3].sum() == 0 and padded.batch["advantages"][3].abs().sum() == 0
    assert padded.batch["attention_mask"][3].tolist() == batch.batch["attention_mask"][1].tolist()
    for name in sorted(batch.batch.keys()):
        assert torch.equal(padded.batch[name][:3], batch.batch[name]), name
    assert batch.batch["response_mask"].sum() == 6
    same, added = batch_ops.pad_with_masked_rows(batch, 3)
    assert same is batch and added == 0
    far, added = batch_ops.pad_with_masked_rows(batch, 64)
    assert (len(far), added) == (64, 61)


def test_duplicates_cycle_when_more_are_missing_than_there_are() -> None:
    batch = make_batch([3, 1, 2])
    padded, added = batch_ops.duplicate_rows(batch, 8, np.random.default_rng(0))
    again, _ = batch_ops.duplicate_rows(batch, 8, np.random.default_rng(0))
    assert (len(padded), added) == (8, 5)
    assert torch.equal(padded.batch["responses"], again.batch["responses"])
    counts = np.bincount(padded.batch["responses"][:, 0].numpy() // RESPONSE, minlength=3)
    assert sorted(counts.tolist()) == [2, 3, 3]


def test_balance_reorders_rows_and_reports_the_spread() -> None:
    batch = make_batch([3, 3, 1, 1])
    metrics = batch_ops.balance_batch(batch, 2)
    tokens = batch.batch["attention_mask"].sum(dim=-1)
    assert tokens[:2].sum() == tokens[2:].sum()
    assert sorted(batch.batch["responses"][:, 0].tolist()) == [0, 3, 6, 9]
    assert {f"global_seqlen/{x}" for x in ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean")} <= set(
        metrics
    )


def test_compute_advantage_refuses_a_wrong_shape() -> None:
    batch = make_batch([3, 1, 2, 2], scores=[1.0, 1.0, 0.0, 0.0])
    config = AlgorithmConfig(adv_estimator="grpo")
    batch_ops.compute_advantage(batch, "grpo", config)
    assert batch.batch["advantages"][:, 0].tolist() == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-3)
    core_algos.register_adv_est("test_wrong_shape")(_wrong_shape)
    try:
        with pytest.raises(ValueError, match=r"test_wrong_shape.*expected"):
            batch_ops.compute_advantage(batch, "test_wrong_shape", config)
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["test_wrong_shape"]


def _wrong_shape(batch: DataProto, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2), torch.zeros(2)


def test_episode_metrics_count_trajectories_once() -> None:
    batch = make_batch([3, 1, 2, 2])
    batch.non_tensor_batch["traj_uid"] = np.array(["a", "a", "a", "b"], dtype=object)
    batch.non_tensor_batch["episode_rewards"] = np.array([10.0, 10.0, 10.0, 0.0], dtype=object)
    metrics = metric_utils.compute_data_metrics(batch=batch)
    assert metrics["episode/reward/mean"] == 5.0 and metrics["episode/reward/max"] == 10.0
    assert metrics["episode/success_rate"] == 0.25
    assert metrics["response_length/mean"] == 2.0 and metrics["response_length/clip_ratio"] == 0.25
    assert metrics["prompt_length/max"] == 3.0 and metrics["prompt_length/clip_ratio"] == 0.0
    timing = metric_utils.compute_timing_metrics(batch=batch, timing_raw={"gen": 2.0, "adv": 1.0, "step": 3.0})
    assert timing["timing_s/gen"] == 2.0 and timing["timing_per_token_ms/gen"] == pytest.approx(2000 / 8)
    assert timing["timing_per_token_ms/adv"] == pytest.approx(1000 / 20) and "timing_per_token_ms/step" not in timing


def test_reduce_metrics_goes_by_name() -> None:
    got = metric_utils.reduce_metrics({"a/max": [1, 3], "a/min": [1, 3], "a/mean": [1, 3], "plain": 5.0})
    assert got == {"a/max": 3.0, "a/min": 1.0, "a/mean": 2.0, "plain": 5.0}
