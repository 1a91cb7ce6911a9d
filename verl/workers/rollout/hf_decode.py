# SPDX-License-Identifier: Apache-2.0
"""The decode loop of the Hugging Face engine: rows that join and leave a batch between tokens.

All rows of a batch have their latest token in the last column of the key/value buffers, wherever they began. So a row
may join at any time: its prompt is padded on the left, or the others are; and what a row attends to is given by its
number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from verl.workers.rollout.base import Generation
from verl.workers.rollout.sampling import SamplingParams, sample_tokens

__all__ = ["DecodeBatch", "Prefilled", "Run", "can_join", "join_caches"]

# Free columns a key/value buffer gets whenever it is full.
_ROOM = 32
# Fewer live rows than this are not worth moving.
_MIN_COMPACT = 8


class _RoomyLayer(DynamicLayer):
    """Keys and values with free columns behind them: a new token is written in place, the past is not copied."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Joins blocks ``(b, heads, length, size)`` along rows, left-padded to the longest."""
        super().__init__()
        self.lazy_initialization(keys[0], values[0])
        self._buffers = [_stack_blocks(keys), _stack_blocks(values)]
        self._show(max(block.shape[-2] for block in keys))

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self._length = length
        keys, values = (buffer[:, :, :length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the new columns and returns all of them."""
        start = self._length
        stop = start + key_states.shape[-2]
        if stop > self._buffers[0].shape[-2]:
            self._buffers = [pad(buffer, (0, 0, 0, stop - start + _ROOM)) for buffer in self._buffers]
        for buffer, new in zip(self._buffers, (key_states, value_states)):
            buffer[:, :, start:stop] = new
        return self._show(stop)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``, in that order."""
        self._buffers = [buffer.index_select(0, indices) for buffer in self._buffers]
        self._show(self._length)


def _stack_blocks(blocks: Sequence[Tensor]) -> Tensor:
    _, heads, _, size = blocks[0].shape
    width = max(block.shape[2] for block in blocks)
    rows = sum(block.shape[0] for block in blocks)
    # Zeros, not garbage: masked keys still enter the products, and NaN times zero weight is NaN.
    out = blocks[0].new_zeros(rows, heads, width + _ROOM, size)
    start = 0
    for block in blocks:
        stop = start + block.shape[0]
        out[start:stop, :, width - block.shape[2] : width] = block
        start = stop
    return out


def can_join(cache: DynamicCache) -> bool:
    """Whether rows of such caches can be padded and put together: not with windows or recurrent states."""
    return all(isinstance(layer, _RoomyLayer) or type(layer) is DynamicLayer for layer in cache.layers)


def join_caches(caches: Sequence[DynamicCache], columns: Sequence[int]) -> DynamicCache:
    """One cache with the rows of all; of each, the last ``columns`` columns."""
    joined = DynamicCache()
    joined.layers = [
        _RoomyLayer(
            [layer.keys[:, :, -count:] for layer, count in zip(layers, columns)],
            [layer.values[:, :, -count:] for layer, count in zip(layers, columns)],
        )
        for layers in zip(*(cache.layers for cache in caches))
    ]
    return joined


@dataclass(frozen=True)
class Prefilled:
    """Prompts that have been computed. ``rows`` ``(B,)`` says which of the given prompts comes where."""

    cache: DynamicCache
    logits: Tensor
    """(B, V), for the first token."""
    lengths: Tensor
    """(B,) int64, tokens of the prompt."""
    rows: Tensor


@dataclass
class _State:
    """What a batch knows of its rows; all tensors share their first dimension."""

    keys: Tensor
    """The caller's, 0 or more; -1 once the row's response has been set aside."""
    seeds: Tensor
    lengths: Tensor
    """Tokens in the cache; also the position of the next one."""
    logits: Tensor
    live: Tensor
    index: Tensor
    """Tokens sampled so far."""
    tokens: Tensor
    log_probs: Tensor
    close: Tensor

    def select(self, rows: Tensor) -> _State:
        return _State(*(column[rows] for column in vars(self).values()))

    def followed_by(self, other: _State) -> _State:
        return _State(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values())))


class DecodeBatch:
    """Rows that are decoded together.

    Args:
        forward: ``(ids (B, 1), mask (B, columns) bool, positions (B, 1), cache) -> logits (B, V)``.
        sampling: of all rows.
        end_ids: ``(E,)`` int64, tokens that end a response; none where only the length does.
        pad_token_id: fills responses on the right.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor, DynamicCache], Tensor],
        sampling: SamplingParams,
        end_ids: Tensor,
        pad_token_id: int,
    ) -> None:
        self.sampling = sampling
        self._forward, self._end_ids, self._pad = forward, end_ids, pad_token_id
        self._cache = DynamicCache()
        self._state: _State | None = None
        self._ended: list[_State] = []
        self.num_live = 0
        self.num_ended = 0

    @property
    def takes_more(self) -> bool:
        """Whether rows can join now: always, or only an empty batch (see `can_join`)."""
        return self._state is None or can_join(self._cache)

    def join(self, new: Prefilled, keys: Tensor, seeds: Tensor) -> None:
        """Take on prompts; ``keys`` and ``seeds`` ``(B,)`` in the order they were given to the prefill."""
        size, limit = len(new.rows), self.sampling.max_new_tokens
        device = new.logits.device
        state = _State(
            keys=keys.to(device)[new.rows],
            seeds=seeds.to(device)[new.rows],
            lengths=new.lengths,
            logits=new.logits,
            live=torch.ones(size, dtype=torch.bool, device=device),
            index=torch.zeros(size, dtype=torch.int64, device=device),
            tokens=torch.full((size, limit), self._pad, dtype=torch.int64, device=device),
            log_probs=torch.full((size, limit), -1.0, dtype=torch.float32, device=device),
            close=torch.zeros(size, dtype=torch.int64, device=device),
        )
        self.num_live += size
        if self._state is None:
            self._state, self._cache = state, new.cache
            return
        self._retire(self._state)
        columns = [int(part.lengths.max()) for part in (self._state, state)]
        self._cache = join_caches([self._cache, new.cache], columns)
        self._state = self._state.followed_by(state)

    def step(self) -> None:
        """Sample one token of every live row and compute the logits for the next."""
        state = self._state
        assert state is not None, "step needs rows"
        draw = sample_tokens(state.logits, state.seeds, state.index, self.sampling)
        live = state.live.nonzero().squeeze(1)
        place = (live, state.index[live])
        state.tokens[place], state.log_probs[place] = draw.tokens[live], draw.log_probs[live]
        state.close += draw.close & state.live
        state.index += state.live
        state.live = state.live & ~torch.isin(draw.tokens, self._end_ids) & (state.index < self.sampling.max_new_tokens)
        before, self.num_live = self.num_live, int(state.live.sum())
        self.num_ended += before - self.num_live
        chosen = draw.tokens
        if self.num_live == 0:
            self._set_aside(state)
            self._state, self._cache = None, DynamicCache()
            return
        if self.num_live <= len(chosen) // 2 and len(chosen) > _MIN_COMPACT:
            chosen = chosen[state.live]
            state = self._retire(state)
        # Every row ends in the last column, the new one, so its tokens are the last of all columns.
        columns = self._cache.get_seq_length() + 1
        mask = torch.arange(columns, device=chosen.device) >= columns - 1 - state.lengths[:, None]
        # Ended rows stay for a while; their positions must not run past the longest that the model knows.
        positions = torch.where(state.live, state.lengths, 0)
        state.logits = self._forward(chosen[:, None], mask, positions[:, None], self._cache)
        state.lengths = state.lengths + 1

    def _set_aside(self, state: _State) -> None:
        """Copy what has ended and not been set aside before; the rows stay in the batch, under a key of -1."""
        ended = (~state.live & (state.keys >= 0)).nonzero().squeeze(1)
        if len(ended):
            self._ended.append(state.select(ended))
            state.keys[ended] = -1

    def _retire(self, state: _State) -> _State:
        """Keep the live rows only."""
        self._set_aside(state)
        if not bool(state.live.all()):
            kept = state.live.nonzero().squeeze(1)
            self._cache.batch_select_indices(kept)
            state = state.select(kept)
        self._state = state
        return state

    def take_ended(self) -> tuple[Tensor, Generation]:
        """Keys and responses of the rows that have ended since the last call, on the CPU."""
        if self._state is not None:
            self._set_aside(self._state)
        parts, self._ended, self.num_ended = self._ended, [], 0
        limit = self.sampling.max_new_tokens
        if not parts:
            none = torch.zeros(0, dtype=torch.int64)
            return none, Generation(none.reshape(0, limit), none, torch.zeros(0, limit), none)
        ended = [torch.cat([getattr(part, name) for part in parts]).cpu() for name in ("keys", "index")]
        rest = [torch.cat([getattr(part, name) for part in parts]).cpu() for name in ("tokens", "log_probs", "close")]
        tokens, log_probs, close = rest
        return ended[0], Generation(tokens, ended[1], log_probs, close)


@dataclass
class Run:
    """Rows under way in the engine: those being decoded, and those waiting for room.

    Args:
        batch: decodes.
        prefill: prompts ``(B, P)`` and their mask -> `Prefilled`.
        max_rows: how many are decoded at a time.
    """

    batch: DecodeBatch
    prefill: Callable[[Tensor, Tensor], Prefilled]
    max_rows: int
    waiting: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """One entry a row: key, ids, mask, seed."""

    def add(self, keys: Tensor, input_ids: Tensor, attention_mask: Tensor, seeds: Tensor) -> None:
        """Rows ``(B, ...)``; their left-padded prompts are as wide as those that wait."""
        self.waiting += zip(keys, input_ids, attention_mask, seeds)

    def advance(self, share: float) -> tuple[Tensor, Generation]:
        """Decode until ``share`` of all rows have ended, at least one; those, in no particular order."""
        needed = max(1, math.ceil(share * (self.batch.num_live + len(self.waiting))))
        while self.batch.num_ended < needed and (self.waiting or self.batch.num_live):
            self._fill()
            self.batch.step()
        return self.batch.take_ended()

    def _fill(self) -> None:
        room = min(self.max_rows - self.batch.num_live, len(self.waiting))
        # A prefill for every row that ends would stop the others again and again.
        if room == 0 or not self.batch.takes_more or room < min(len(self.waiting), self.max_rows // 4):
            return
        chosen, self.waiting = self.waiting[:room], self.waiting[room:]
        keys, ids, masks, seeds = (torch.stack(column) for column in zip(*chosen))
        self.batch.join(self.prefill(ids, masks), keys, seeds)
