# SPDX-License-Identifier: Apache-2.0
"""Prompts of one turn -> token ids: one tokenizer call for all rows; history goes before anything else is cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_system.multi_turn_rollout.settings import Truncation

__all__ = ["EncodedTurn", "PromptEncoder", "truncate_ids"]

logger = logging.getLogger(__name__)

# (row numbers, turns of history to show) -> shorter messages for those rows.
Shorten = Callable[[Sequence[int], Sequence[int]], list[str]]


@dataclass(frozen=True)
class EncodedTurn:
    """Left-padded prompts of N rows."""

    input_ids: torch.Tensor
    """(N, P) int64."""
    attention_mask: torch.Tensor
    """(N, P) int64, 0 on padding."""
    position_ids: torch.Tensor
    """(N, P) int64: index of a token among the row's real tokens, 0 on padding."""
    num_shortened: int = 0
    """Rows that lost history."""
    num_dropped_turns: int = 0
    """Turns of history lost, over all rows."""
    num_truncated: int = 0
    """Rows that were too long even without history and were cut by `data.truncation`."""


def truncate_ids(ids: list[int], limit: int, policy: Truncation) -> list[int]:
    """At most `limit` of `ids`: `left` cuts the beginning, `right` the end, `middle` keeps both ends.

    Raises:
        UserError: `policy` is `error` and `ids` is too long.
    """
    if len(ids) <= limit:
        return ids
    if policy == "left":
        return ids[-limit:]
    if policy == "right":
        return ids[:limit]
    if policy == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise UserError(
        f"a prompt has {len(ids)} tokens without any history, data.max_prompt_length is {limit}; "
        "raise data.max_prompt_length or set data.truncation to left, right or middle."
    )


class PromptEncoder:
    """Chat template and tokenizer for one user message per row."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        truncation: Truncation,
        chat_template_kwargs: dict[str, Any],
    ) -> None:
        """
        Raises:
            UserError: the tokenizer has no pad token or no chat template.
        """
        if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no pad_token or no eos_token; set them in its tokenizer_config.json.")
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat_template; use an instruction-tuned model or add a template.")
        self._tokenizer = tokenizer
        self._limit = max_prompt_length
        self._truncation: Truncation = truncation
        self._kwargs = chat_template_kwargs

    def encode(self, messages: Sequence[str], history_shown: Sequence[int], shorten: Shorten) -> EncodedTurn:
        """Token ids of `messages`, at most P each.

        Rows that are too long lose their oldest turn of history until they fit or have none left; only then does
        `data.truncation` act, so that task, observation and commands survive whenever they fit at all.

        Args:
            messages: one user message per row.
            history_shown: turns of history in each message.
            shorten: builds messages with fewer turns.
        """
        ids = self._tokenize(messages)
        keep = list(history_shown)
        too_long = [row for row, tokens in enumerate(ids) if len(tokens) > self._limit and keep[row] > 0]
        shortened = len(too_long)
        while too_long:
            for row in too_long:
                keep[row] -= 1
            for row, tokens in zip(too_long, self._tokenize(shorten(too_long, [keep[row] for row in too_long]))):
                ids[row] = tokens
            too_long = [row for row in too_long if len(ids[row]) > self._limit and keep[row] > 0]
        truncated = sum(len(tokens) > self._limit for tokens in ids)
        if truncated:
            ids = [truncate_ids(tokens, self._limit, self._truncation) for tokens in ids]
        input_ids, mask, positions = self._pad(ids)
        return EncodedTurn(input_ids, mask, positions, shortened, sum(history_shown) - sum(keep), truncated)

    def _tokenize(self, messages: Sequence[str]) -> list[list[int]]:
        conversations = [[{"role": "user", "content": message}] for message in messages]
        texts = self._tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, tokenize=False, **self._kwargs
        )
        # The template has written the special tokens already. verbose=False: too long prompts are handled here.
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _pad(self, ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = np.fromiter((len(tokens) for tokens in ids), dtype=np.int64, count=len(ids))
        columns = np.arange(self._limit) - (self._limit - lengths[:, None])
        mask = columns >= 0
        out = np.full(mask.shape, self._tokenizer.pad_token_id, dtype=np.int64)
        out[mask] = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in ids])
        positions = np.maximum(columns, 0)
        return torch.from_numpy(out), torch.from_numpy(mask.astype(np.int64)), torch.from_numpy(positions)
