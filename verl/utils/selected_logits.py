# SPDX-License-Identifier: Apache-2.0
"""Head outputs (logits, values) of a model at chosen positions only: the head skips all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.utils.errors import UserError

__all__ = ["output_head", "selected_logits"]

# Names that transformers gives to the head of its token classifiers.
_CLASSIFIER_HEADS = ("score", "classifier")


def output_head(model: nn.Module) -> nn.Module:
    """The module that maps hidden states to logits or to a value per token; looks through an FSDP1 wrapper.

    Raises:
        UserError: the model has none, so it is no causal language model and no token classifier.
    """
    inner: Any = model
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    heads = [inner.get_output_embeddings(), *(dict(inner.named_children()).get(name) for name in _CLASSIFIER_HEADS)]
    for head in heads:
        if isinstance(head, nn.Module):
            return head
    raise UserError(f"{type(inner).__name__} has no output head; use a causal language model")


@contextmanager
def _only(head: nn.Module, row: torch.Tensor, column: torch.Tensor) -> Iterator[None]:
    # A hook on the head, not a call of the parts: the outer module's forward has to run for FSDP to gather weights.
    def pick(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = args[0]
        return (hidden.flatten(0, 1).index_select(0, row * hidden.shape[1] + column), *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def selected_logits(
    model: nn.Module, input_ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor, **forward_args: Any
) -> torch.Tensor:
    """One forward pass; logits at the K positions (row[k], column[k]).

    Args:
        model: Hugging Face causal language model or token classifier (V labels), plain or sharded by FSDP.
        input_ids: (B, L) int64.
        row, column: (K,) int64, K >= 1, on the same device.
        forward_args: passed on (attention mask, position ids).

    Returns:
        (K, V) logits in the model's compute dtype.
    """
    with _only(output_head(model), row, column):
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False, **forward_args).logits
    return logits
