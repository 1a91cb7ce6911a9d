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
    "get_generation_config",
    "get_model_size",
    "print_model_size",
    "update_model_config",
]

logger = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """``clip(cumsum(mask) - 1, 0)`` along the last dimension; same shape and dtype as an integer ``mask``."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


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
