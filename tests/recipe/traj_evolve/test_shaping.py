# SPDX-License-Identifier: Apache-2.0
"""The penalty's arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.traj_evolve.shaping import EpisodeCredit, redundant_steps, scale_redundant_advantages, shaped_reward


def test_steps_below_the_threshold_are_redundant() -> None:
    credit = np.array([0.49, 0.5, 0.51, 0.0, 1.0], dtype=np.float32)
    assert redundant_steps(credit, 0.5).tolist() == [True, False, False, True, False]
    assert redundant_steps(credit, 1.0).tolist() == [True, True, True, True, False]


def test_a_success_keeps_its_last_step() -> None:
    assert redundant_steps(np.zeros(3), 0.5).tolist() == [True, True, False]
    assert redundant_steps(np.zeros(1), 0.5).tolist() == [False]


def test_exploration_is_exempt_on_request() -> None:
    credit, explored = np.array([0.0, 0.0, 1.0]), np.array([True, False, False])
    assert redundant_steps(credit, 0.5, explored).tolist() == [True, True, False]
    assert redundant_steps(credit, 0.5, explored, count_exploration=False).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="exploration mask"):
        redundant_steps(credit, 0.5, count_exploration=False)


def test_a_verdict_ends_at_the_first_success() -> None:
    verdict = EpisodeCredit(np.array([0.0, 1.0], dtype=np.float32), np.array([True, False]))
    assert verdict.rho == 0.5 and verdict.is_redundant(0) and not verdict.is_redundant(2)
    assert verdict.credit_of(1) == 1.0 and math.isnan(verdict.credit_of(2))


def test_both_penalties_by_hand() -> None:
    assert shaped_reward(10.0, 0.25, 1.0, "relative") == 7.5
    assert shaped_reward(8.0, 0.5, 0.5, "relative") == 6.0
    assert shaped_reward(8.0, 0.5, 0.5, "absolute") == 5.5
    with pytest.raises(ValueError, match="unknown penalty"):
        shaped_reward(8.0, 0.5, 0.5, "quadratic")


@given(
    credit=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60),
    threshold=st.floats(0.01, 1.0),
    alpha=st.floats(0, 1),
    reward=st.floats(0.1, 10),
)
def test_a_success_stays_above_every_failure(
    credit: list[float], threshold: float, alpha: float, reward: float
) -> None:
    redundant = redundant_steps(np.array(credit, dtype=np.float32), threshold)
    assert redundant.sum() <= len(credit) - 1
    assert 0.0 < shaped_reward(reward, float(redundant.mean()), alpha, "relative") <= reward


@pytest.mark.parametrize("penalty", ["relative", "absolute"])
def test_alpha_0_changes_no_bit(penalty: str) -> None:
    for reward in (10.0, 0.1 + 0.2, 7.3):
        assert shaped_reward(reward, 0.7, 0.0, penalty) == reward


def test_only_positive_advantages_of_redundant_rows_shrink() -> None:
    advantages = torch.tensor([[0.8, 0.8], [-0.4, -0.4], [0.8, 0.0], [-0.3, 0.0]])
    redundant = torch.tensor([True, True, False, False])
    scaled = scale_redundant_advantages(advantages, redundant, alpha=0.75)
    torch.testing.assert_close(scaled, torch.tensor([[0.2, 0.2], [-0.4, -0.4], [0.8, 0.0], [-0.3, 0.0]]))
    assert scale_redundant_advantages(advantages, redundant, 3.0)[0].tolist() == [0.0, 0.0]
    assert torch.equal(scale_redundant_advantages(advantages, redundant, 0.0), advantages)
