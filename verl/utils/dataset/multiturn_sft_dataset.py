# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning rows that hold whole conversations; every turn of the assistant is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from verl.trainer.config.sft_sections import SFTDataConfig
from verl.utils.dataset.chat import ChatTokenizer, as_messages, pad_id, tokenize_texts
from verl.utils.dataset.parquet import read_column
from verl.utils.dataset.sft_dataset import TokenRowsDataset, data_section, read_rows, read_weights, rows_of_ids
from verl.utils.errors import UserError

__all__ = ["MultiTurnSFTDataset", "conversation_segments"]


class MultiTurnSFTDataset(TokenRowsDataset):
    """A parquet file (or several, concatenated) of conversations, tokenised once at construction.

    Targets are the assistant's turns with everything the chat template writes around them (role header and end
    marker), so that the model also learns to stop. Nothing is added after the conversation.
    """

    def __init__(
        self,
        parquet_files: str | Path | Sequence[str | Path],
        tokenizer: ChatTokenizer,
        config: SFTDataConfig | Mapping[str, Any] | None = None,
        *,
        config_key: str = "data.train_files",
    ) -> None:
        """Read and tokenise.

        Args:
            parquet_files: path or paths.
            config: the `data` section, or some of its keys; `multiturn.messages_key` (`messages`) names the column.
            config_key: key that messages name when a file is missing or broken.

        Raises:
            UserError: a missing file or column, a cell that is no conversation, a conversation without the assistant
                or one that the chat template refuses, a template that writes earlier turns differently once later ones
                follow, a row that is too long.
        """
        data = data_section(config)
        frame, where = read_rows(parquet_files, config_key)
        column = data.multiturn.messages_key
        cells = read_column(frame, column, "data.multiturn.messages_key", where)
        ids, targets = _tokenize(cells, tokenizer, f"{where}: row %d, column {column!r}")
        rows = rows_of_ids(
            ids,
            targets,
            max_length=data.max_length,
            truncation=data.truncation,
            weights=read_weights(frame, data.weight_key, where),
            where=f"{where}: row",
        )
        super().__init__(rows, data.max_length, pad_id(tokenizer))


def _tokenize(cells: Sequence[Any], tokenizer: ChatTokenizer, place: str) -> tuple[list[list[int]], list[np.ndarray]]:
    segments: list[list[tuple[str, bool]]] = []
    for i, cell in enumerate(cells):
        try:
            if isinstance(cell, str):
                raise ValueError("a conversation must be a list of chat messages with role and content")
            segments.append(conversation_segments(as_messages(cell), tokenizer))
        except (ValueError, TemplateError) as error:
            raise UserError(f"{place % i}: {error}") from error
    # Segments are tokenised apart, so that the border of a turn is exact whatever the tokenizer merges.
    flat = iter(tokenize_texts([text for row in segments for text, _ in row], tokenizer))
    ids, targets = [], []
    for row in segments:
        parts = [(next(flat), trained) for _, trained in row]
        ids.append([token for tokens, _ in parts for token in tokens])
        targets.append(np.concatenate([np.full(len(tokens), trained) for tokens, trained in parts]))
    return ids, targets


def conversation_segments(messages: Sequence[Mapping[str, str]], tokenizer: ChatTokenizer) -> list[tuple[str, bool]]:
    """The rendered conversation cut into (text, is a turn of the assistant); joined, the texts are the whole.

    Raises:
        ValueError: no turn of the assistant, or the template writes the first messages differently once more follow
            (templates that drop old thoughts do), so that a turn has no fixed place in the whole.
    """

    def render(count: int) -> str:
        if count == 0:
            return ""
        return tokenizer.apply_chat_template(list(messages[:count]), tokenize=False, add_generation_prompt=False)

    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("there is no message of the role assistant, so nothing to train on")
    whole = render(len(messages))
    segments: list[tuple[str, bool]] = []
    done = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(i), render(i + 1)
        if not (whole.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template writes the first {i + 1} messages differently when more follow, so message {i} has "
                "no fixed place; write one row per assistant turn (prompt and response) instead"
            )
        segments += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*segments, (whole[done:], False)]
