# SPDX-License-Identifier: Apache-2.0
"""GiGPO: step groups and joint advantages against per-row code, by hand, and through the trainer's estimator call."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from recipe.gigpo import core_gigpo
from tests.helpers import per_row
from tests.helpers.random_rows import Rows, rows
from verl.protocol import DataProto
from verl.trainer.config.schema import AlgorithmConfig, GiGPOConfig
from verl.trainer.ppo import batch_ops, core_algos

FEW = settings(max_examples=60, deadline=None)


def returns_of(batch: Rows) -> torch.Tensor:
    data = DataProto.from_dict({"x": batch.mask}, {"rewards": batch.step_rewards, "traj_uid": batch.traj})
    return batch_ops.compute_step_returns(data, 0.5)


@FEW
@given(rows())
def test_joint_advantage_equals_the_per_row_form(batch: Rows) -> None:
    returns = returns_of(batch)
    for mode, std in (("mean_norm", False), ("mean_std_norm", True)):
        for weight in (1.0, 0.3):
            got, again = core_gigpo.compute_gigpo_outcome_advantage(
                batch.rewards, returns, batch.mask, batch.anchors, batch.index, batch.traj,
                step_advantage_w=weight, mode=mode,
            )  # fmt: skip
            expected = per_row.gigpo(
                batch.rewards, returns, batch.mask, batch.anchors, batch.index, batch.traj, weight, std
            )
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(got, again)


@FEW
@given(rows())
def test_weight_zero_is_grpo_bit_for_bit(batch: Rows) -> None:
    for mode, std in (("mean_norm", False), ("mean_std_norm", True)):
        for cross in (True, False):
            got, _ = core_gigpo.compute_gigpo_outcome_advantage(
                batch.rewards, returns_of(batch), batch.mask, batch.anchors, batch.index, batch.traj,
                step_advantage_w=0.0, mode=mode, compute_mean_std_cross_steps=cross,
            )  # fmt: skip
            grpo, _ = core_algos.compute_grpo_outcome_advantage(
                batch.rewards, batch.mask, batch.index, batch.traj, norm_adv_by_std_in_grpo=std,
                compute_mean_std_cross_steps=cross,
            )  # fmt: skip
            assert torch.equal(got, grpo)


@FEW
@given(rows())
def test_states_seen_once_have_no_step_advantage(batch: Rows) -> None:
    groups = core_gigpo.build_step_group([f"state {row}" for row in range(len(batch.index))], batch.index)
    assert groups.tolist() == list(range(len(batch.index)))
    for remove_std in (True, False):
        step = core_gigpo.step_norm_reward(returns_of(batch), batch.mask, groups, remove_std=remove_std)
        assert step.abs().max() == 0.0


def test_parts_add_up() -> None:
    rewards = torch.tensor([[0.0, 10.0], [0.0, 10.0], [0.0, 0.0], [0.0, 0.0]])
    mask, returns = torch.ones(4, 2, dtype=torch.int64), torch.tensor([9.0, 10.0, 0.0, 0.0])
    anchors, uid, traj = ["hall", "shop", "hall", "hall"], ["g"] * 4, ["a", "a", "b", "b"]
    groups = core_gigpo.build_step_group(anchors, uid)
    assert groups.tolist() == [0, 1, 0, 0]
    episode = core_gigpo.episode_norm_reward(rewards, mask, uid, traj)
    step = core_gigpo.step_norm_reward(returns, mask, groups)
    assert episode[:, 0].tolist() == [5.0, 5.0, -5.0, -5.0] and step[:, 0].tolist() == [6.0, 0.0, -3.0, -3.0]
    joint, _ = core_gigpo.compute_gigpo_outcome_advantage(
        rewards, returns, mask, anchors, uid, traj, step_advantage_w=0.5
    )
    torch.testing.assert_close(joint, episode + 0.5 * step)
    with pytest.raises(ValueError, match="mean_norm"):
        core_gigpo.compute_gigpo_outcome_advantage(rewards, returns, mask, anchors, uid, traj, mode="std")


def test_observations_of_every_kind_are_compared_by_value() -> None:
    pixels = np.arange(6).reshape(2, 3)
    observations = np.empty(8, dtype=object)
    observations[:] = [
        pixels, {"b": 1, "a": [1, 2]}, pixels.copy(), {"a": [1, 2], "b": 1}, pixels + 1, (1, 2), [1, 2], 7
    ]  # fmt: skip
    assert core_gigpo.build_step_group(observations, ["g"] * 8).tolist() == [0, 1, 0, 1, 2, 3, 3, 4]
    assert core_gigpo.to_hashable(pixels) == (0, 1, 2, 3, 4, 5)
    with pytest.raises(TypeError, match="set"):
        core_gigpo.to_hashable({1})


def test_groups_of_different_tasks_are_kept_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        groups = core_gigpo.build_step_group(["x", "x", "y", "x"], ["a", "b", "a", "a"], summarize=True)
    assert groups.tolist() == [0, 1, 2, 0]
    assert "singleton_ratio" in caplog.text
    assert core_gigpo.summarize_group_size([2, 1, 1]) == {"count": 3, "mean": 4 / 3, "max": 2, "singleton_ratio": 0.5}
    assert core_gigpo.summarize_group_size([])["count"] == 0


def rollout(batch: Rows) -> DataProto:
    return DataProto.from_dict(
        {"token_level_rewards": batch.rewards, "response_mask": batch.mask, "step_rewards": returns_of(batch)},
        {"uid": batch.index, "traj_uid": batch.traj, "anchor_obs": batch.anchors},
    )


@FEW
@given(rows())
def test_the_registered_estimator_reads_its_config_and_logs_group_sizes(batch: Rows) -> None:
    options = GiGPOConfig(step_advantage_w=0.7, mode="mean_std_norm", enable_similarity=True, similarity_thresh=0.5)
    config = AlgorithmConfig(gigpo=options, compute_mean_std_cross_steps=False, singleton_advantage="zero")
    data, metrics = rollout(batch), {}
    batch_ops.compute_advantage(data, "gigpo", config, metrics)
    expected, _ = core_gigpo.compute_gigpo_outcome_advantage(
        batch.rewards, returns_of(batch), batch.mask, batch.anchors, batch.index, batch.traj, step_advantage_w=0.7,
        mode="mean_std_norm", enable_similarity=True, similarity_thresh=0.5, compute_mean_std_cross_steps=False,
        singleton="zero",
    )  # fmt: skip
    assert torch.equal(data.batch["advantages"], expected)
    sizes = list(map(per_row.exact_groups(batch.anchors, batch.index).count, range(len(batch.index))))
    assert metrics["gigpo/step_group_size/max"] == max(sizes)
    assert metrics["gigpo/step_group_count"] == sum(size > 0 for size in sizes)
    assert metrics["gigpo/singleton_step_ratio"] == sizes.count(1) / len(batch.index)
    plain = replace(config, gigpo=replace(options, enable_similarity=False))
    again = rollout(batch)
    batch_ops.compute_advantage(again, "gigpo", plain)
    assert torch.equal(again.batch["advantages"], expected)  # one-letter observations: similar means equal


def test_registering_is_light() -> None:
    script = "import sys, recipe.gigpo, recipe.hgpo; print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
