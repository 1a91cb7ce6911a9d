# SPDX-License-Identifier: Apache-2.0
"""The vectorised estimators against one-row-at-a-time implementations of the same formulas, on random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import per_row
from tests.helpers.random_rows import Rows, rows
from verl.protocol import DataProto
from verl.trainer.ppo import batch_ops, core_algos
from verl.trainer.ppo.group_stats import combine_labels, factorize, suffix_sums


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == torch.float32 and torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


FEW = settings(max_examples=60, deadline=None)


@FEW
@given(rows(), st.booleans(), st.booleans())
def test_grpo(batch: Rows, std: bool, cross: bool) -> None:
    got, _ = core_algos.compute_grpo_outcome_advantage(
        batch.rewards, batch.mask, batch.index, batch.traj, norm_adv_by_std_in_grpo=std,
        compute_mean_std_cross_steps=cross,
    )  # fmt: skip
    close(got, per_row.grpo(batch.rewards, batch.mask, batch.index, batch.traj, std, cross))
    if std and cross:
        close(got, per_row.grpo_floats(batch.rewards, batch.mask, batch.index))


@FEW
@given(rows(min_members=2), st.booleans())
def test_grpo_passk(batch: Rows, std: bool) -> None:
    got, _ = core_algos.compute_grpo_passk_outcome_advantage(
        batch.rewards, batch.mask, batch.index, batch.traj, norm_adv_by_std_in_grpo=std,
        compute_mean_std_cross_steps=False,
    )  # fmt: skip
    close(got, per_row.grpo_passk(batch.rewards, batch.mask, batch.index, batch.traj, std))
    assert len({traj for traj, row in zip(batch.traj, got) if row.any()}) <= len(set(batch.index))


@FEW
@given(rows(), st.booleans())
def test_rloo(batch: Rows, cross: bool) -> None:
    got, _ = core_algos.compute_rloo_outcome_advantage(
        batch.rewards, batch.mask, batch.index, batch.traj, compute_mean_std_cross_steps=cross
    )
    close(got, per_row.rloo(batch.rewards, batch.mask, batch.index, batch.traj, cross))


@FEW
@given(rows(min_members=2))
def test_reinforce_plus_plus_baseline(batch: Rows) -> None:
    got, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.rewards, batch.mask, batch.index, batch.traj
    )
    close(got, per_row.reinforce_plus_plus_baseline(batch.rewards, batch.mask, batch.index, batch.traj))


@FEW
@given(rows(min_members=2), st.sampled_from([1.0, 0.9, 0.0]), st.booleans())
def test_token_returns(batch: Rows, gamma: float, with_holes: bool) -> None:
    mask = batch.mask.clone()
    if with_holes:  # tokens of an observation inside a response are skipped, not a wall
        mask[:, 1] = 0
        mask[:, 0] = 1
    got, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(batch.rewards, mask, gamma)
    expected, expected_returns = per_row.reinforce_plus_plus(batch.rewards, mask, gamma)
    close(returns, expected_returns)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    remax, _ = core_algos.compute_remax_outcome_advantage(batch.rewards, torch.ones(len(mask)), mask)
    close(remax, per_row.token_returns(batch.rewards, mask, 1.0) - mask.float())


@FEW
@given(rows(min_members=2), st.sampled_from([1.0, 0.95]), st.sampled_from([1.0, 0.9, 0.0]))
def test_gae(batch: Rows, gamma: float, lam: float) -> None:
    values = torch.sin(torch.arange(batch.mask.numel()).float()).reshape(batch.mask.shape)
    got, returns = core_algos.compute_gae_advantage_return(batch.rewards, values, batch.mask, gamma, lam)
    expected, expected_returns = per_row.gae(batch.rewards, values, batch.mask, gamma, lam)
    close(returns, expected_returns)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@FEW
@given(rows(), st.sampled_from([1.0, 0.95, 0.0]))
def test_step_returns(batch: Rows, gamma: float) -> None:
    data = DataProto.from_dict({"x": batch.mask}, {"rewards": batch.step_rewards, "traj_uid": batch.traj})
    got = batch_ops.compute_step_returns(data, gamma)
    close(got, per_row.step_returns(batch.step_rewards, batch.traj, gamma))
    close(got, per_row.step_returns_one_pass(batch.step_rewards, batch.traj, gamma))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 1000])
def test_suffix_sums_of_one_long_segment(length: int) -> None:
    values = np.arange(length, dtype=np.float64)
    expected, running = [], 0.0
    for value in values[::-1]:
        running = value + 0.5 * running
        expected.append(running)
    assert suffix_sums(values, ["t"] * length, 0.5).tolist() == pytest.approx(expected[::-1])


def test_nothing_is_a_batch_too() -> None:
    assert suffix_sums(np.zeros(0), [], 0.9).shape == (0,)
    assert factorize([]).shape == (0,)
    assert combine_labels(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).shape == (0,)


@FEW
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), min_size=1, max_size=30))
def test_labels_number_keys_in_order_of_appearance(pairs: list[tuple[str, int]]) -> None:
    expected = [list(dict.fromkeys(pairs)).index(pair) for pair in pairs]
    assert factorize(pairs).tolist() == expected
    labels = combine_labels(factorize([a for a, _ in pairs]), factorize([b for _, b in pairs]))
    assert labels.tolist() == expected


@FEW
@given(rows())
def test_group_keys_may_be_anything(batch: Rows) -> None:
    """Texts, small integers (used as they are), huge or negative integers, tuples: the same statistics."""
    scores = batch.rewards.sum(-1)
    expected = core_algos.group_stats(scores, batch.index)
    numbers = factorize(batch.index)
    for keys in (numbers, numbers + 3, numbers * 10**12, -numbers, [(int(n), "x") for n in numbers], numbers.tolist()):
        for got, wanted in zip(core_algos.group_stats(scores, keys), expected, strict=True):
            assert torch.equal(got, wanted)


@FEW
@given(rows())
def test_the_trajectory_switch_is_statistics_of_first_rows(batch: Rows) -> None:
    scores = batch.rewards.sum(-1)
    first = sorted(set(np.unique(batch.traj.astype(str), return_index=True)[1].tolist()))
    mean, std, count = core_algos.group_stats(scores, batch.index, batch.traj, cross_steps=False)
    of_first = core_algos.group_stats(scores[first], batch.index[first])
    for got, wanted in zip((mean, std, count), of_first, strict=True):
        assert torch.equal(got[first], wanted)
