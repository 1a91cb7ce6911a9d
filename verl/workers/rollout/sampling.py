# SPDX-License-Identifier: Apache-2.0
"""Sampling that depends on a row's seed and nothing else.

A token is drawn by the Gumbel-max rule: ``argmax_v (log p_v + g_v)`` with independent standard Gumbel ``g_v`` follows
``p``. Each ``g_v`` is a hash of (seed of the row, index of the token in the response, v), so a draw is the same in any
batch, at any place in it, on any rank or device, whatever was drawn before.

The hash is SplitMix64 (Steele, Lea, Flood 2014) used as a counter-based generator: the finaliser applied to
``key + (v + 1) * gamma``, with a key that is itself a hash of seed and token index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.trainer.config.worker_sections import RolloutConfig

__all__ = [
    "CLOSE_DRAW",
    "Draw",
    "SamplingParams",
    "gumbel_noise",
    "resolve_sampling",
    "sample_tokens",
    "short_seeds",
    "token_log_probs",
]

CLOSE_DRAW = 1e-4
"""Where the two best scores differ by less, rounding decides: a batch of another shape may draw the other token."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
# Elements hashed at once: bounds the int64 scratch memory for large vocabularies.
_BLOCK = 1 << 24


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn.

    ``temperature`` divides the logits; ``top_k <= 0`` and ``top_p >= 1`` are off. ``do_sample=False`` or a temperature
    of 0 takes the most likely token. ``ignore_eos`` always generates ``max_new_tokens`` tokens.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_new_tokens: int = 512
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return not self.do_sample or self.temperature <= 0.0

    @property
    def from_model(self) -> bool:
        """Whether the distribution sampled from is the model's own."""
        return self.greedy or (self.temperature == 1.0 and self.top_k <= 0 and self.top_p >= 1.0)


def resolve_sampling(config: RolloutConfig, meta_info: Mapping[str, Any]) -> SamplingParams:
    """Sampling of one call: ``meta_info`` wins over ``rollout.val_kwargs`` (``validate`` true) or ``rollout``."""
    defaults = config.val_kwargs if meta_info.get("validate", False) else config
    return SamplingParams(
        do_sample=bool(meta_info.get("do_sample", defaults.do_sample)),
        temperature=float(meta_info.get("temperature", defaults.temperature)),
        top_k=int(meta_info.get("top_k", defaults.top_k)),
        top_p=float(meta_info.get("top_p", defaults.top_p)),
        max_new_tokens=config.response_length,
        ignore_eos=config.ignore_eos,
    )


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place on int64 (two's complement arithmetic wraps as needed)."""
    # >> is arithmetic: the sign bits it brings in must go.
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _MIX_1
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _MIX_2
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def short_seeds(seeds: Tensor) -> Tensor:
    """63-bit seeds hashed to 32 bits, ``(B,)`` int64 in ``[0, 2^32)``.

    torch's generator on the CPU reads no more than the lower half of a seed; every bit of ours counts.
    """
    return _mix(seeds + _GAMMA) & 0xFFFFFFFF


def _keys(seeds: Tensor, token_index: int | Tensor) -> Tensor:
    steps = torch.as_tensor(token_index, dtype=torch.int64, device=seeds.device) + 1
    return _mix(_mix(seeds + _GAMMA) + steps * _GAMMA)


def gumbel_noise(seeds: Tensor, token_index: int | Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel numbers for one token of each row: ``(B,)`` int64 seeds -> ``(B, vocab_size)`` float32.

    ``token_index`` is one number for all rows, or ``(B,)`` int64.
    """
    keys = _keys(seeds, token_index)
    counters = torch.arange(1, vocab_size + 1, device=seeds.device) * _GAMMA
    noise = torch.empty(seeds.shape[0], vocab_size, dtype=torch.float32, device=seeds.device)
    rows = max(1, _BLOCK // vocab_size)
    for start in range(0, seeds.shape[0], rows):
        bits = _mix(keys[start : start + rows, None] + counters)
        # The winner of the race has the smallest exponential, so precision is needed near 0: log1p(-u) with u from
        # 32 bits keeps it, where log(u) near 1 would not. The upper clamp keeps log1p finite.
        uniform = ((bits >> 32) & 0xFFFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
        noise[start : start + rows] = uniform.neg_().log1p_().neg_().log_().neg_()
    return noise


def token_log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probabilities of the distribution that is sampled from: ``(B, V)`` -> ``(B, V)`` float32.

    Temperature first, then top-k, then top-p; tokens outside have -inf and the rest sums to one. Greedy decoding
    reports the model's own distribution (temperature 1).
    """
    logits = logits.float()
    if sampling.greedy:
        return torch.log_softmax(logits, dim=-1)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = torch.topk(logits, sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(logits, dim=-1, descending=True)
        before = torch.softmax(ordered, dim=-1).cumsum(dim=-1) - torch.softmax(ordered, dim=-1)
        # The first token over the threshold stays; so does the most likely one for any top_p.
        outside = before >= sampling.top_p
        outside[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


class Draw(NamedTuple):
    """One token of each row."""

    tokens: Tensor
    """(B,) int64."""
    log_probs: Tensor
    """(B,) float32, see `token_log_probs`."""
    close: Tensor
    """(B,) bool: the two best scores differ by less than `CLOSE_DRAW`."""


def sample_tokens(logits: Tensor, seeds: Tensor, token_index: int | Tensor, sampling: SamplingParams) -> Draw:
    """One token for each row.

    Args:
        logits: ``(B, V)``, any float dtype.
        seeds: ``(B,)`` int64.
        token_index: index of the token in the response; one for all rows, or ``(B,)`` int64.
    """
    log_probs = token_log_probs(logits, sampling)
    scores = log_probs if sampling.greedy else log_probs + gumbel_noise(seeds, token_index, logits.shape[-1])
    tokens = scores.argmax(dim=-1)
    best = scores.topk(min(2, scores.shape[-1]), dim=-1).values
    close = best[:, 0] - best[:, -1] < CLOSE_DRAW
    return Draw(tokens, log_probs.gather(1, tokens[:, None]).squeeze(1), close)
