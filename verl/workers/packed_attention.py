# SPDX-License-Identifier: Apache-2.0
"""Attention inside the rows of a packed sequence, through SDPA.

All other layers see one sequence of real tokens. Only here rows are taken apart again: rows of similar length form a
block padded to its longest row, and plain causal attention needs no mask, because what is behind a row's last token
cannot be seen by it. The cost is that of the rows, not of the square of the packed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from verl.utils.errors import UserError

__all__ = ["PACKED_SDPA", "PackedRows", "check_can_pack"]

PACKED_SDPA = "packed_sdpa"
"""Name under which the attention is registered with transformers."""

# A block's shortest row has at least this share of its longest row's tokens, so at most a tenth is padding, and only in
# attention. A smaller share means fewer kernel calls, but on the CPU more time (measured: 0.4 costs 3 to 14 % of an
# update of 32 rows).
_SHORTEST_SHARE = 0.9
_SEPARABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})


class _Block:
    """Rows of similar length, contiguous in the packed sequence."""

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device) -> None:
        self.start, self.stop = start, start + sum(lengths)
        self.rows, self.longest = len(lengths), lengths[0]
        self.slots: Tensor | None = None
        """(tokens,) int64 place of each token among rows * longest; None where no row needs padding."""
        if lengths[-1] < lengths[0]:
            columns = torch.arange(self.longest)
            self.slots = (columns < torch.tensor(lengths)[:, None]).flatten().nonzero().squeeze(1).to(device)

    def unpack(self, states: Tensor) -> Tensor:
        """``(1, heads, S, size)`` -> ``(rows, heads, longest, size)``."""
        tokens = states[0, :, self.start : self.stop]
        heads, _, size = tokens.shape
        if self.slots is not None:
            tokens = tokens.new_zeros(heads, self.rows * self.longest, size).index_copy(1, self.slots, tokens)
        return tokens.reshape(heads, self.rows, self.longest, size).transpose(0, 1)

    def pack(self, states: Tensor) -> Tensor:
        """``(rows, longest, heads, size)`` -> ``(tokens, heads, size)``."""
        flat = states.flatten(0, 1)
        return flat if self.slots is None else flat.index_select(0, self.slots)

    def window_mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """``(1, 1, longest, longest)`` causal mask of a sliding window; None where the window covers the rows."""
        if window is None or window >= self.longest:
            return None
        columns = torch.arange(self.longest, device=device)
        distance = columns[:, None] - columns
        return ((distance >= 0) & (distance < window))[None, None]


class PackedRows:
    """Layout of rows packed into one sequence, longest first.

    Not a dataclass: FSDP copies those on their way into a module.

    Args:
        lengths: tokens of each row, all positive, falling.
        device: where the model runs.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.blocks: list[_Block] = []
        first, start = 0, 0
        for index in range(1, len(lengths) + 1):
            if index == len(lengths) or lengths[index] < _SHORTEST_SHARE * lengths[first]:
                block = _Block(start, lengths[first:index], device)
                self.blocks.append(block)
                first, start = index, block.stop


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``(1, heads, S, size)`` query, ``(1, kv heads, S, size)`` key and value -> ``(1, S, heads, size)``."""
    if packed_rows is None:
        raise UserError(
            f"{type(module).__name__} does not hand its caller's arguments on to attention, so packed rows would see "
            "each other; set use_remove_padding=False"
        )
    options.pop("is_causal", None)
    parts = []
    for block in packed_rows.blocks:
        mask = block.window_mask(sliding_window, query.device)
        rows = (block.unpack(query), block.unpack(key), block.unpack(value))
        out, _ = sdpa_attention_forward(module, rows[0], rows[1], rows[2], mask, is_causal=mask is None, **options)
        parts.append(block.pack(out))
    return torch.cat(parts)[None], None


AttentionInterface.register(PACKED_SDPA, _packed_sdpa)


def check_can_pack(config: PretrainedConfig) -> None:
    """Refuse models with layers that carry a state from token to token, which packing would leak between rows.

    Raises:
        UserError: the model has such layers.
    """
    kinds = set(config.to_dict().get("layer_types") or ())
    if kinds - _SEPARABLE_LAYERS:
        raise UserError(
            f"layers of kind {', '.join(sorted(kinds - _SEPARABLE_LAYERS))} ({config.model_type}) cannot keep packed "
            "rows apart; set use_remove_padding=False"
        )
