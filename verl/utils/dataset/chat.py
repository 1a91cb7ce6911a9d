# SPDX-License-Identifier: Apache-2.0
"""Chat messages -> text through a tokenizer's template -> token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["ChatTokenizer", "as_messages", "pad_id", "render_prompts", "tokenize_texts"]

_TOKENIZER_BATCH = 1024


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the data sets use."""

    eos_token_id: int | None
    pad_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


def as_messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt cell as chat messages: a string is one user message, a list of messages is taken as it is.

    Raises:
        ValueError: the cell is neither.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, (list, tuple, np.ndarray)) and len(prompt) > 0:
        messages = [dict(m) if isinstance(m, Mapping) else {} for m in prompt]
        if all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
            return messages
    raise ValueError("a prompt must be a string or a list of chat messages with role and content")


def render_prompts(
    prompts: Sequence[Any], tokenizer: ChatTokenizer, template_options: Mapping[str, Any] | None = None
) -> list[str]:
    """Prompt texts through the tokenizer's chat template, ending where the assistant's answer starts."""
    options = dict(template_options or {})
    return [
        tokenizer.apply_chat_template(as_messages(prompt), tokenize=False, add_generation_prompt=True, **options)
        for prompt in prompts
    ]


def tokenize_texts(texts: Sequence[str], tokenizer: ChatTokenizer) -> list[list[int]]:
    """Ids per text without added special tokens; the tokenizer is called on batches."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _TOKENIZER_BATCH):
        chunk = list(texts[start : start + _TOKENIZER_BATCH])
        ids.extend(tokenizer(chunk, add_special_tokens=False)["input_ids"])
    return ids


def pad_id(tokenizer: ChatTokenizer) -> int:
    """Id used to fill rows: the pad token, else the end token, else 0 (filled positions never reach the loss)."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
