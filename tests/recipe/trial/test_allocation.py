# SPDX-License-Identifier: Apache-2.0
"""TRIAL's equations: against a reference that goes row by row, and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.trial.allocation import (
    TokenGaps,
    add_term,
    allocate,
    clamp_term,
    dense_term,
    permute_weights,
    relative_weights,
    token_gaps,
    token_mean,
)
from recipe.trial.metrics import gap_metrics, term_metrics, weight_metrics

BETA, C = 0.1, 1.0
ODD = (float("nan"), float("inf"), float("-inf"))
Gaps = list[list[float]]


def reference_weights(gaps: Gaps, mask: Gaps, traj: Sequence[int], c: float) -> list[float]:
    """The formula of the method for one turn after the other, with Python's numbers."""
    turns = []
    for row, allowed in zip(gaps, mask, strict=True):
        eligible = [g for g, m in zip(row, allowed, strict=True) if m and math.isfinite(g)]
        turns.append((sum(abs(min(max(g, -c), c)) for g in eligible), len(eligible)))
    weights = []
    for (magnitude, tokens), own in zip(turns, traj, strict=True):
        sizes, counts = zip(*[turn for turn, other in zip(turns, traj, strict=True) if other == own], strict=True)
        if tokens == 0:
            weights.append(0.0)
        elif sum(sizes) == 0.0:
            weights.append(1.0)
        else:
            weights.append((magnitude / sum(sizes)) / (tokens / sum(counts)))
    return weights


def gaps_of(rows: Gaps, mask: Gaps) -> TokenGaps:
    values = torch.tensor(rows, dtype=torch.float32)
    return token_gaps(values, torch.zeros_like(values), torch.tensor(mask).bool())


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Gaps, Gaps, list[int]]:
    """Gaps, mask and trajectory numbers: turns without tokens, one-turn trajectories, zeros and non-finite gaps."""
    rows, width = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    sizes = [st.floats(-limit, limit, width=32, allow_subnormal=False) for limit in (3.0, 2.0**-99)]
    number = st.one_of(*sizes, st.just(0.0), st.sampled_from(ODD))
    gaps = [draw(st.lists(number, min_size=width, max_size=width)) for _ in range(rows)]
    mask = [[float(draw(st.booleans())) for _ in range(width)] for _ in range(rows)]
    labels = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return gaps, mask, [order[label] for label in labels]


def token_weighted_means(weights: Tensor, tokens: Tensor, trajectory: Tensor) -> Tensor:
    """One per trajectory that has eligible tokens."""
    total = torch.bincount(trajectory, weights=tokens.double())
    mean = torch.bincount(trajectory, weights=weights * tokens) / total
    return mean[total > 0]


@settings(max_examples=150, deadline=None)
@given(rollouts(), st.sampled_from(["relative", "uniform", "permuted"]), st.integers(0, 5))
def test_multipliers_of_any_rollout(rollout: tuple[Gaps, Gaps, list[int]], allocation: Any, seed: int) -> None:
    rows, mask, labels = rollout
    gaps, trajectory = gaps_of(rows, mask), torch.tensor(labels)
    tokens = gaps.num_tokens
    clipped = gaps.gap.clamp(-C, C)
    weights = allocate(allocation, clipped, tokens, trajectory, np.random.default_rng(seed))
    means = token_weighted_means(weights, tokens, trajectory)
    torch.testing.assert_close(means, torch.ones_like(means), atol=1e-6, rtol=0)
    assert torch.isfinite(weights).all() and (weights >= 0).all()
    assert (weights[tokens == 0] == 0).all()
    if allocation == "uniform":
        assert set(weights.tolist()) <= {0.0, 1.0}
    if allocation == "relative":
        expected = torch.tensor(reference_weights(rows, mask, labels, C), dtype=torch.float64)
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6)
    term = dense_term(clipped, weights, BETA)
    assert torch.isfinite(term).all() and (term[~gaps.eligible] == 0).all()


def test_two_turns_by_hand() -> None:
    # Turn 1: tokens with gaps 0.5 and -2 (clipped to -1), so m = 1.5, n = 2. Turn 2: one token, 0.25, so m = 0.25.
    gaps = gaps_of([[0.5, -2.0, 9.0], [0.25, 9.0, 9.0]], [[1, 1, 0], [1, 0, 0]])
    clipped = gaps.gap.clamp(-C, C)
    assert clipped.tolist() == [[0.5, -1.0, 0.0], [0.25, 0.0, 0.0]]
    weights = allocate("relative", clipped, gaps.num_tokens, torch.tensor([0, 0]), np.random.default_rng(0))
    # (1.5 / 1.75) / (2 / 3) = 9/7 and (0.25 / 1.75) / (1 / 3) = 3/7; (2 * 9/7 + 3/7) / 3 = 1.
    assert weights.tolist() == pytest.approx([9 / 7, 3 / 7])
    advantages = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    term = dense_term(clipped, weights, BETA)
    result = add_term(advantages, term)
    expected = [[1 + 0.1 * 9 / 7 * 0.5, 1 - 0.1 * 9 / 7, 0.0], [-1 + 0.1 * 3 / 7 * 0.25, 0.0, 0.0]]
    torch.testing.assert_close(result, torch.tensor(expected))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    metrics = gap_metrics(gaps, torch.tensor([True, False]))
    metrics |= weight_metrics(weights, gaps.num_tokens, torch.tensor([0, 0]))
    metrics |= term_metrics(term, advantages, mask)
    shares = [6 / 7, 1 / 7]
    assert metrics == pytest.approx(
        {
            "trial/gap_mean": (0.5 - 2 + 0.25) / 3,
            "trial/gap_mean_success": -0.75,
            "trial/gap_mean_failure": 0.25,
            "trial/gap_abs_mean": 2.75 / 3,
            "trial/weight_max": 9 / 7,
            "trial/weight_min": 3 / 7,
            "trial/weight_entropy": -sum(share * math.log(share) for share in shares),
            "trial/dense_to_grpo_ratio": 0.1 * (9 / 7 * 1.5 + 3 / 7 * 0.25) / 3,
        }
    )


def test_a_single_turn_has_exactly_one() -> None:
    tokens = torch.tensor([3, 7, 1])
    weights = relative_weights(torch.tensor([0.3, 1e-7, 5.1]), tokens, torch.arange(3))
    assert weights.tolist() == [1.0, 1.0, 1.0]


def test_without_a_gap_all_turns_are_alike() -> None:
    weights = relative_weights(torch.zeros(4), torch.tensor([2, 5, 0, 1]), torch.tensor([0, 0, 0, 1]))
    assert weights.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_gaps_that_are_not_finite_do_not_take_part() -> None:
    ordinary = torch.tensor([[-1.0, -1.0, float("-inf"), -1.0, -1.0]])
    hindsight = torch.tensor([[-0.5, float("nan"), float("-inf"), float("-inf"), -3.0]])
    gaps = token_gaps(hindsight, ordinary, torch.ones(1, 5, dtype=torch.bool))
    assert gaps.eligible.tolist() == [[True, False, False, False, True]]
    assert gaps.gap.tolist() == [[0.5, 0.0, 0.0, 0.0, -2.0]]
    nothing = token_gaps(torch.full((2, 3), float("nan")), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    weights = relative_weights(nothing.gap.sum(-1), nothing.num_tokens, torch.tensor([0, 0]))
    assert weights.tolist() == [0.0, 0.0]
    assert gap_metrics(nothing, torch.tensor([True, True])) == {}
    assert weight_metrics(weights, nothing.num_tokens, torch.tensor([0, 0])) == {}


def test_permuted_multipliers_stay_in_their_trajectory_and_follow_the_seed() -> None:
    size = 24
    trajectory = torch.arange(size) % 3
    tokens = torch.full((size,), 2)
    tokens[5] = 0
    magnitude = torch.arange(1.0, size + 1) * (tokens > 0)
    weights = relative_weights(magnitude, tokens, trajectory)

    def permuted(seed: int) -> Tensor:
        return permute_weights(weights, tokens, trajectory, np.random.default_rng(seed))

    first = permuted(1)
    assert torch.equal(first, permuted(1)) and not torch.equal(first, permuted(2))
    assert not torch.equal(first, weights) and first[5] == 0.0
    for number in range(3):
        rows = trajectory == number
        # All of these turns have two tokens, so nothing has to be scaled.
        torch.testing.assert_close(first[rows].sort().values, weights[rows].sort().values)


def test_permuted_multipliers_are_scaled_to_mean_one() -> None:
    tokens, trajectory = torch.tensor([1, 9]), torch.tensor([0, 0])
    weights = relative_weights(torch.tensor([5.0, 0.0]), tokens, trajectory)
    assert weights.tolist() == [10.0, 0.0]
    swapped = next(
        result
        for seed in range(20)
        if (result := permute_weights(weights, tokens, trajectory, np.random.default_rng(seed)))[0] == 0.0
    )
    assert swapped.tolist() == pytest.approx([0.0, 10 / 9])


def test_the_term_is_clamped_to_the_advantages_size() -> None:
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    advantages = torch.tensor([[0.5, -0.5], [0.5, 0.0]])
    large = torch.tensor([[3.0, -3.0], [0.0, 0.0]])
    clamped = clamp_term(large, advantages, mask)
    assert token_mean(clamped.abs(), mask) == pytest.approx(0.5)
    torch.testing.assert_close(clamped, large / 4)
    small = large / 100
    assert clamp_term(small, advantages, mask) is small
    assert not clamp_term(large, torch.zeros(2, 2), mask).any()


def test_where_the_term_is_zero_every_bit_stays() -> None:
    advantages = torch.tensor([-0.0, 0.1, float("-inf")])
    result = add_term(advantages, torch.zeros(3))
    assert torch.equal(result.view(torch.int32), advantages.view(torch.int32))
