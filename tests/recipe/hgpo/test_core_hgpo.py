# SPDX-License-Identifier: Apache-2.0
"""HGPO: history groups and advantages against per-row code, by hand, and through its program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.hgpo import core_hgpo
from tests.helpers import per_row
from tests.helpers.random_rows import Rows, rows
from verl.protocol import DataProto
from verl.trainer.config.schema import AlgorithmConfig, HGPOConfig, PPOConfig, build_config, load_config
from verl.trainer.ppo import batch_ops

REPO = Path(__file__).resolve().parents[3]


def returns_of(batch: Rows) -> torch.Tensor:
    data = DataProto.from_dict({"x": batch.mask}, {"rewards": batch.step_rewards, "traj_uid": batch.traj})
    return batch_ops.compute_step_returns(data, 0.5)


@settings(max_examples=80, deadline=None)
@given(rows(), st.integers(0, 3), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0, 2.0]))
def test_equals_the_per_row_form(batch: Rows, history: int, std: bool, base: bool, alpha: float) -> None:
    returns = returns_of(batch)
    got, again = core_hgpo.compute_hgpo_outcome_advantage(
        batch.rewards, returns, batch.mask, batch.anchors, batch.index, batch.traj, history,
        mode="mean_std_norm" if std else "mean_norm", length_weight_alpha=alpha, base_group=base,
    )  # fmt: skip
    expected = per_row.hgpo(
        batch.rewards, returns, batch.mask, batch.anchors, batch.index, batch.traj, history, std=std, alpha=alpha,
        base=base,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(got, again)


def test_by_hand() -> None:
    """Two episodes meet in "door", one of them on another way: k = 1 compares them, k = 2 does not."""
    anchors, traj = ["hall", "door", "yard", "door"], ["a", "a", "b", "b"]
    returns, mask = torch.tensor([4.0, 8.0, 1.0, 2.0]), torch.ones(4, 1)
    levels = core_hgpo.history_groups(anchors, ["g"] * 4, traj, 2)
    assert [(rows.tolist(), groups.tolist()) for rows, groups in levels] == [
        ([0, 1, 2, 3], [0, 1, 2, 1]),
        ([1, 3], [0, 1]),
    ]
    got, _ = core_hgpo.compute_hgpo_outcome_advantage(
        mask, returns, mask, anchors, ["g"] * 4, traj, 2, mode="mean_norm"
    )
    assert got[:, 0].tolist() == pytest.approx([0.0, 3.0, 0.0, -3.0], abs=1e-4)
    with pytest.raises(ValueError, match="mean_norm"):
        core_hgpo.compute_hgpo_outcome_advantage(mask, returns, mask, anchors, ["g"] * 4, traj, 2, mode="x")


@settings(max_examples=40, deadline=None)
@given(rows(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_given_turns_rows_may_come_in_any_order_and_twice(batch: Rows, history: int, random: object) -> None:
    """With the turn column, groups do not depend on where the rows are, and a copied row joins its original's."""
    turns = core_hgpo._turns(core_hgpo.dense_labels(batch.traj))
    straight = core_hgpo.history_groups(batch.anchors, batch.index, batch.traj, history, turns)
    by_order = core_hgpo.history_groups(batch.anchors, batch.index, batch.traj, history)
    count = len(turns)
    order = list(range(count)) + [0]
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = core_hgpo.history_groups(
        batch.anchors[order], batch.index[order], batch.traj[order], history, turns[order]
    )
    assert len(straight) == len(by_order) == len(shuffled)
    for (rows_a, groups_a), (rows_b, groups_b), (rows_c, groups_c) in zip(straight, by_order, shuffled):
        assert rows_a.tolist() == rows_b.tolist() and groups_a.tolist() == groups_b.tolist()
        label = dict(zip(rows_a.tolist(), groups_a.tolist()))
        pairs = {(label[order[row]], int(group)) for row, group in zip(rows_c, groups_c)}
        assert len(pairs) == len(set(label.values())) == len({group for _, group in pairs})


def test_a_missing_turn_is_an_error() -> None:
    with pytest.raises(ValueError, match="whole trajectories"):
        core_hgpo.history_groups(["x", "y"], ["g", "g"], ["t", "t"], 1, [0, 2])


def test_the_registered_estimator_reads_its_config() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 12
    columns = {
        "uid": ["g", "h"] * 6,
        "traj_uid": [f"t{row % 4}" for row in range(count)],
        "anchor_obs": ["x", "y", "x"] * 4,
        "step_index": [row // 4 for row in range(count)],
    }
    data = DataProto.from_dict(
        {
            "token_level_rewards": torch.randn(count, 3, generator=generator),
            "response_mask": torch.ones(count, 3, dtype=torch.int64),
            "step_rewards": torch.randn(count, generator=generator),
        },
        {name: np.array(values, dtype=object) for name, values in columns.items()},
    )
    options = HGPOConfig(mode="mean_norm", length_weight_alpha=2.0, base_group=True, history_length=1)
    batch_ops.compute_advantage(data, "hgpo", AlgorithmConfig(hgpo=options, compute_mean_std_cross_steps=False))
    batch, rest = data.batch, data.non_tensor_batch
    expected, _ = core_hgpo.compute_hgpo_outcome_advantage(
        batch["token_level_rewards"], batch["step_rewards"], batch["response_mask"], rest["anchor_obs"], rest["uid"],
        rest["traj_uid"], 1, mode="mean_norm", length_weight_alpha=2.0, base_group=True,
        compute_mean_std_cross_steps=False,
    )  # fmt: skip
    assert torch.equal(batch["advantages"], expected) and expected.abs().max() > 0


def test_history_length_follows_the_environment() -> None:
    config = build_config(PPOConfig, load_config("ppo_trainer", ["env.history_length=5"]))
    assert config.algorithm.hgpo.history_length == 5
    config = build_config(PPOConfig, load_config("ppo_trainer", ["algorithm.hgpo.history_length=1"]))
    assert (config.algorithm.hgpo.history_length, config.env.history_length) == (1, 2)


def test_its_program_is_the_plain_one_with_its_estimator() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipe.hgpo.main_hgpo", "--cfg", "job", "data.train_batch_size=3"],
        cwd=REPO, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "adv_estimator: hgpo" in done.stdout and "train_batch_size: 3" in done.stdout
