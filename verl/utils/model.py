# SPDX-License-Identifier: Apache-2.0
"""Small helpers around Hugging Face models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

__all__ = [
    "collect_eos_token_ids",
    "compute_position_id_with_mask",
    "create_random_mask",
    "get_generation_config",
    "get_model_size",
    "print_model_size",
    "update_model_config",
]

logger = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """``clip(cumsum(mask) - 1, 0)`` along the last dimension; same shape and dtype as an integer ``mask``."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


def create_random_mask(
    input_ids: torch.Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Random masks of left- and right-padded rows, for tests: (B, S) like `input_ids`, each row a run of ones.

    Args:
        max_ratio_of_valid_token, min_ratio_of_valid_token: bounds of a row's ones over S, in [0, 1].
        max_ratio_of_left_padding: bound of its leading zeros over S; with the first bound at most 1 in sum.
        generator: of the draws; None = one that starts at seed 0.
    """
    size, width = input_ids.shape
    draws = torch.rand(2, size, generator=generator or torch.Generator().manual_seed(0))
    low, high = int(min_ratio_of_valid_token * width), int(max_ratio_of_valid_token * width)
    ones = low + (draws[0] * (high - low + 1)).long()
    left = (draws[1] * (int(max_ratio_of_left_padding * width) + 1)).long()
    column = torch.arange(width)
    return ((column >= left[:, None]) & (column < (left + ones)[:, None])).to(input_ids)


def update_model_config(module_config: PretrainedConfig, override_config_kwargs: Mapping[str, Any]) -> None:
    """Sets attributes of a model configuration in place; nested mappings descend into nested configurations."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """Generation configuration saved with a model, or None when it has none."""
    try:
        return GenerationConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except OSError:
        return None


def collect_eos_token_ids(generation_config: GenerationConfig | None, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that ends a response: the model's generation configuration and its tokenizer, sorted."""
    ids: set[int] = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    configured = None if generation_config is None else generation_config.eos_token_id
    if isinstance(configured, int):
        ids.add(configured)
    elif configured is not None:
        ids.update(int(token) for token in configured)
    return tuple(sorted(ids))


def get_model_size(model: nn.Module) -> int:
    """Number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Logs the parameter count in millions."""
    logger.info("%s: %.3f million parameters", name or type(model).__name__, get_model_size(model) / 1e6)
