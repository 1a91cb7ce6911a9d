# SPDX-License-Identifier: Apache-2.0
"""Rows for the hindsight pass: the prompt that the policy saw, with the turn's outcome at the end of the user message.

The outcome is inserted between tokens, so what comes before and after it is, token for token, what the policy saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.protocol import DataProto
from verl.trainer.ppo.columns import tensors_of
from verl.utils.dataset.chat import ChatTokenizer, pad_id, render_prompts, tokenize_texts

__all__ = ["HindsightPrompts"]

# User messages that differ in their last character: what their prompts have in common at the end is the template's.
_PROBES = ("one", "two.", "(3)")


class HindsightPrompts:
    """Inserts outcomes into the prompts of one tokenizer.

    Args:
        tokenizer: of the policy.
        max_outcome_length: tokens of an outcome; longer ones lose their end.
        template_options: `data.apply_chat_template_kwargs`.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, max_outcome_length: int, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._limit = max_outcome_length
        probes = tokenize_texts(render_prompts(_PROBES, tokenizer, template_options), tokenizer)
        self.tail = torch.tensor(_common_end(probes), dtype=torch.int64)
        """(K,) ids that the chat template writes after the user message."""

    def build(self, batch: DataProto, outcomes: Sequence[str]) -> tuple[DataProto, dict[str, int]]:
        """The batch's rows with an outcome each, and in how many rows something is amiss with it.

        A prompt that does not end with the template's tail (`data.truncation` has cut it off, or the tokenizer merges
        the tail's beginning with the message) gets the outcome at its end.

        Args:
            batch: `input_ids`, `attention_mask` (B, P + R) with left-padded prompts, `responses` (B, R).
            outcomes: B texts.

        Returns:
            `input_ids`, `attention_mask`, `position_ids` (B, P' + R) with P' <= P + max_outcome_length, `responses`;
            `outcomes_shortened`, rows whose outcome was too long, and `outcomes_misplaced`, rows without the tail.
        """
        tensors = tensors_of(batch)
        responses, size = tensors["responses"], tensors["responses"].shape[1]
        ids, mask = tensors["input_ids"], tensors["attention_mask"]
        prompt, prompt_mask = ids[:, :-size], mask[:, :-size].bool()
        outcome, outcome_mask, num_shortened = self._encode(outcomes)
        tail = self.tail.expand(len(ids), -1)
        has_tail = _ends_with(prompt, prompt_mask, self.tail)
        # The tail moves behind the outcome: masked where it was, repeated where it belongs.
        kept = prompt_mask.clone()
        kept[:, prompt.shape[1] - len(self.tail) :] &= ~has_tail[:, None]
        parts = torch.cat([prompt, outcome, tail], dim=1)
        mask_of_parts = torch.cat([kept, outcome_mask, has_tail[:, None].expand(-1, len(self.tail))], dim=1)
        longest = int(mask_of_parts.sum(dim=1).max())
        # Stable: padding first, tokens in their order behind it.
        order = mask_of_parts.to(torch.uint8).argsort(dim=1, stable=True)[:, parts.shape[1] - longest :]
        new_mask = torch.cat([mask_of_parts.gather(1, order).to(mask.dtype), mask[:, -size:]], dim=1)
        columns = {
            "input_ids": torch.cat([parts.gather(1, order), ids[:, -size:]], dim=1),
            "attention_mask": new_mask,
            "position_ids": (new_mask.cumsum(dim=1) - 1).clamp(min=0),
            "responses": responses,
        }
        counts = {"outcomes_shortened": num_shortened, "outcomes_misplaced": int((~has_tail).sum())}
        return DataProto.from_dict(columns), counts

    def _encode(self, outcomes: Sequence[str]) -> tuple[Tensor, Tensor, int]:
        """Right-padded ids and mask (B, O) of the outcomes, and how many were shortened."""
        ids = tokenize_texts(outcomes, self._tokenizer)
        rows = [torch.tensor(row[: self._limit], dtype=torch.int64) for row in ids]
        lengths = torch.tensor([len(row) for row in rows])
        padded = pad_sequence(rows, batch_first=True, padding_value=pad_id(self._tokenizer))
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return padded, mask, sum(len(row) > self._limit for row in ids)


def _common_end(rows: Sequence[Sequence[int]]) -> list[int]:
    """The longest common suffix."""
    shortest = min(map(len, rows))
    size = next((k for k in range(shortest) if len({row[-1 - k] for row in rows}) > 1), shortest)
    return list(rows[0][len(rows[0]) - size :])


def _ends_with(prompt: Tensor, mask: Tensor, tail: Tensor) -> Tensor:
    """(B,) bool: the row's last tokens are `tail`."""
    size = len(tail)
    if size > prompt.shape[1]:
        return torch.zeros(len(prompt), dtype=torch.bool)
    start = prompt.shape[1] - size
    return ((prompt[:, start:] == tail) & mask[:, start:]).all(dim=1)
