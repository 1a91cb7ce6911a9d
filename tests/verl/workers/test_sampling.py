# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch

from verl.trainer.config.worker_sections import RolloutConfig, ValKwargsConfig
from verl.workers.rollout.sampling import SamplingParams, gumbel_noise, resolve_sampling, sample_tokens, token_log_probs


def splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_noise_is_the_documented_hash() -> None:
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15
    seed, token_index, vocab = 123456789012345, 3, 50
    key = splitmix64((splitmix64((seed + gamma) & mask) + (token_index + 1) * gamma) & mask)
    expected = []
    for v in range(vocab):
        uniform = ((splitmix64((key + (v + 1) * gamma) & mask) >> 32) + 0.5) / 2**32
        expected.append(-math.log(-math.log1p(-uniform)))
    noise = gumbel_noise(torch.tensor([seed]), token_index, vocab)[0]
    assert torch.allclose(noise, torch.tensor(expected), atol=1e-5)


def test_noise_has_gumbel_moments_and_no_correlation() -> None:
    noise = gumbel_noise(torch.arange(2000), 0, 500).double()
    assert abs(float(noise.mean()) - 0.5772157) < 0.005
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.01
    neighbours = torch.corrcoef(torch.stack([noise[:, 0], noise[:, 1]]))[0, 1]
    following = torch.corrcoef(torch.stack([noise[:-1, 0], noise[1:, 0]]))[0, 1]
    later = gumbel_noise(torch.arange(2000), 1, 500).double()
    steps = torch.corrcoef(torch.stack([noise[:, 0], later[:, 0]]))[0, 1]
    assert max(abs(float(c)) for c in (neighbours, following, steps)) < 0.08


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(3)) * 1.5
    draws = 20_000
    sampling = SamplingParams(temperature=temperature)
    tokens, log_probs, _ = sample_tokens(logits.expand(draws, -1), torch.arange(draws), 5, sampling)
    probabilities = torch.softmax(logits / temperature, dim=0)
    counts = torch.bincount(tokens, minlength=8)
    chi_square = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    assert chi_square < 24.3  # 99.9 % quantile, 7 degrees of freedom
    assert torch.allclose(log_probs, probabilities.log()[tokens], atol=1e-5)


def test_token_index_and_seed_change_the_draws() -> None:
    logits = torch.zeros(64, 100)
    seeds = torch.arange(64)
    first, *_ = sample_tokens(logits, seeds, 0, SamplingParams())
    second, *_ = sample_tokens(logits, seeds, 1, SamplingParams())
    other, *_ = sample_tokens(logits, seeds + 64, 0, SamplingParams())
    assert (first != second).sum() > 50
    assert (first != other).sum() > 50
    assert len(first.unique()) > 30


def test_greedy_takes_the_best_and_reports_the_model_s_distribution() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    for sampling in (SamplingParams(do_sample=False, temperature=0.5), SamplingParams(temperature=0.0)):
        tokens, log_probs, _ = sample_tokens(logits, torch.arange(5), 0, sampling)
        assert torch.equal(tokens, logits.argmax(dim=1))
        assert torch.allclose(log_probs, torch.log_softmax(logits, 1).max(dim=1).values)


def test_draws_that_rounding_decides_are_known() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0 + 5e-5], [0.0, 1.0, 1.1], [0.0, 0.0, 9.0]])
    assert sample_tokens(logits, torch.arange(3), 0, SamplingParams(do_sample=False)).close.tolist() == [1, 0, 0]
    # The noise decides otherwise: of many draws between equals, about one in 1e4 is close.
    equals = torch.zeros(40_000, 4)
    close = sample_tokens(equals, torch.arange(40_000), 0, SamplingParams()).close
    assert 0 < int(close.sum()) < 40
    assert sample_tokens(torch.zeros(2, 3), torch.arange(2), 0, SamplingParams(top_k=1)).close.tolist() == [0, 0]


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]])
    logits = probabilities.log()
    top_k = token_log_probs(logits, SamplingParams(top_k=2)).exp()
    assert torch.allclose(top_k, torch.tensor([[2 / 3, 1 / 3, 0, 0, 0]]), atol=1e-6)
    top_p = token_log_probs(logits, SamplingParams(top_p=0.7)).exp()
    assert torch.allclose(top_p, torch.tensor([[2 / 3, 1 / 3, 0, 0, 0]]), atol=1e-6)
    alone = token_log_probs(logits, SamplingParams(top_p=1e-9)).exp()
    assert torch.allclose(alone, torch.tensor([[1.0, 0, 0, 0, 0]]))
    tokens, *_ = sample_tokens(logits.expand(500, -1), torch.arange(500), 0, SamplingParams(top_k=2))
    assert set(tokens.tolist()) == {0, 1}


def test_meta_info_wins_over_the_config() -> None:
    config = RolloutConfig(temperature=0.9, top_k=5, val_kwargs=ValKwargsConfig(temperature=0.4, do_sample=True))
    assert resolve_sampling(config, {}) == SamplingParams(temperature=0.9, top_k=5)
    assert resolve_sampling(config, {"validate": True}).temperature == 0.4
    assert resolve_sampling(config, {"validate": True, "temperature": 0.1, "top_p": 0.5}) == SamplingParams(
        temperature=0.1, top_p=0.5
    )
    assert resolve_sampling(config, {"do_sample": False}).greedy
