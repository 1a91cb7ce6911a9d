# SPDX-License-Identifier: Apache-2.0
"""Tensor functions shared by workers and trainers: log-probabilities, masks, padding, learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.absent import absent_name

__all__ = [
    "clip_by_value",
    "distributed_masked_mean",
    "distributed_mean_max_min_std",
    "entropy_from_logits",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_response_mask",
    "get_wsd_schedule_with_warmup",
    "log_probs_from_logits_response",
    "logprobs_from_logits",
    "logprobs_from_logits_naive",
    "logprobs_from_logits_v2",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "postprocess_data",
    "remove_pad_token",
    "tokenize_and_postprocess_data",
]


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label: ``(..., V)``, ``(...)`` int64 -> ``(...)`` float32."""
    logits = logits.float()
    chosen = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


# Names of the reference's variants; there is one implementation.
logprobs_from_logits_naive = logprobs_from_logits
logprobs_from_logits_v2 = logprobs_from_logits


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Log-probabilities of the last ``response_length`` = R tokens: ``(B, S)``, ``(B, S, V)`` -> ``(B, R)``."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats, ``logsumexp(z) - sum(softmax(z) z)``: ``(..., V)`` -> ``(...)`` float32."""
    logits = logits.float()
    return torch.logsumexp(logits, dim=-1) - torch.sum(torch.softmax(logits, dim=-1) * logits, dim=-1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """``x`` limited elementwise to ``[tensor_min, tensor_max]``."""
    return torch.max(torch.min(x, tensor_max), tensor_min)


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum where ``mask`` is non-zero; masked-out entries may hold anything, NaN included."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean where ``mask`` is non-zero; 0 where nothing is kept."""
    count = mask.bool().sum() if axis is None else mask.bool().sum(dim=axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the kept values; ``unbiased`` divides by n - 1.

    Raises:
        ValueError: fewer than two kept values with ``unbiased``.
    """
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if not unbiased:
        return variance
    count = mask.bool().sum()
    if count < 2:
        raise ValueError(f"the unbiased variance needs at least two kept values, got {int(count)}")
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``(values - mean) / std`` over kept values; ``shift_mean=False`` adds the mean back."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end token, 0 after it: ``(B, R)`` -> ``(B, R)``."""
    ends = torch.as_tensor([eos_token] if isinstance(eos_token, int) else list(eos_token), device=response_id.device)
    is_end = torch.isin(response_id, ends).long()
    return ((torch.cumsum(is_end, dim=1) - is_end) == 0).to(dtype)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Right-pads lists to the longest of them, or to ``max_length`` where that is more: ``(B, L)`` int64."""
    width = max(len(row) for row in response)
    if max_length is not None:
        width = max(width, max_length)
    return torch.tensor([[*row, *([pad_token_id] * (width - len(row)))] for row in response])


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: int | float, left_pad: bool = False
) -> Tensor:
    """Pads the last dimension to ``max_seq_len``; a longer tensor comes back unchanged."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pads or truncates ``(B, S)`` ids and mask to ``max_length``.

    ``truncation``: ``left`` keeps the end, ``right`` the beginning, ``middle`` both ends.

    Raises:
        ValueError: too long with ``truncation="error"``, or an unknown mode.
    """
    if truncation not in ("error", "left", "right", "middle"):
        raise ValueError(f"truncation={truncation!r} is unknown (known: error, left, right, middle)")
    length = input_ids.shape[-1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    if truncation == "error":
        raise ValueError(
            f"{length} tokens are more than the limit of {max_length}; raise the limit or set a truncation mode"
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    keep = torch.cat([torch.arange(head), torch.arange(length - (max_length - head), length)]).to(input_ids.device)
    return input_ids[..., keep], attention_mask[..., keep]


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """``(1, max_length)`` ids and mask of a text without added special tokens; see `postprocess_data`."""
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        tokens["input_ids"], tokens["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Token lists of left-padded rows, without their padding."""
    return [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask)]


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Linear from 0 over ``num_warmup_steps``, then constant."""

    def factor(step: int) -> float:
        return min(1.0, step / max(1, num_warmup_steps)) if num_warmup_steps > 0 else 1.0

    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up from ``min_lr_ratio`` to 1, then a cosine to ``min_lr_ratio``, which holds after the last step."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return min_lr_ratio + (1.0 - min_lr_ratio) * step / max(1, num_warmup_steps)
        progress = min(1.0, (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))
        wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
        return min_lr_ratio + (1.0 - min_lr_ratio) * wave

    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Warm-up, stable, decay: linear to 1, constant for ``stable_ratio`` of the rest, then a cosine down."""
    num_stable_steps = int((num_training_steps - num_warmup_steps) * stable_ratio)
    decay_start = num_warmup_steps + num_stable_steps
    num_decay_steps = num_training_steps - decay_start

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        if step <= decay_start:
            return 1.0
        if step >= num_training_steps:
            return min_lr_ratio
        progress = (step - decay_start) / max(1, num_decay_steps)
        wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
        return min_lr_ratio + (1.0 - min_lr_ratio) * wave

    return LambdaLR(optimizer, factor, last_epoch)


def distributed_mean_max_min_std(
    local_tensor: Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Mean, largest, smallest and (n - 1)-standard deviation of all ranks' numbers, 0-d each; a collective.

    What is not asked for is None.
    """
    sums = torch.stack([local_tensor.sum(), torch.tensor(local_tensor.numel()).to(local_tensor)])
    dist.all_reduce(sums)
    mean = sums[0] / sums[1]
    largest = smallest = deviation = None
    if compute_max:
        largest = local_tensor.max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if compute_min:
        smallest = local_tensor.min()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    if compute_std:
        squares = ((local_tensor - mean) ** 2).sum()
        dist.all_reduce(squares)
        deviation = torch.sqrt(squares / (sums[1] - 1))
    return mean, largest, smallest, deviation


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """Mean over all ranks of the entries where the mask is set, 0-d; a collective."""
    sums = torch.stack([(local_tensor * local_mask).sum(), local_mask.sum().to(local_tensor)])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def __getattr__(name: str) -> Any:
    absent_name(__name__, name)
