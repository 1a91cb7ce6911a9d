# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning rows of a prompt and a response: parquet -> chat template -> token ids, tokenised once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.trainer.config.builder import build_config
from verl.trainer.config.sft_sections import SFTDataConfig
from verl.utils.dataset.chat import ChatTokenizer, as_messages, pad_id, render_prompts, tokenize_texts
from verl.utils.dataset.parquet import read_column, read_parquet
from verl.utils.dataset.token_rows import TokenRows
from verl.utils.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SFTDataset", "TokenRowsDataset", "cut_row", "rows_of_ids", "tokenize_pairs"]

logger = logging.getLogger(__name__)

TRUNCATIONS = ("error", "left", "right")
_COLUMNS = {"prompt_key": "prompt", "response_key": "response", "prompt_dict_keys": (), "response_dict_keys": ()}


def tokenize_pairs(
    prompts: Sequence[Any],
    responses: Sequence[str],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    truncation: str = "error",
    weights: Sequence[float] | np.ndarray | None = None,
    where: str = "row",
) -> TokenRows:
    """Prompt cells and response texts as token rows: chat template + response + end-of-sequence token.

    Prompt and response are tokenised apart, so the border between them is exact whatever the tokenizer merges.

    Args:
        prompts: N strings or message lists.
        responses: N texts.
        max_length: most tokens a row may have.
        truncation: for longer rows; `error` refuses, `left` keeps the last `max_length` tokens, `right` the first.
        weights: (N,) row weights, default 1.
        where: how messages name a row, for example the file.

    Raises:
        UserError: unknown truncation, a tokenizer without end token, or a row that is too long under `error`.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token, so responses could not end; set one in tokenizer_config.json")
    prompt_ids = tokenize_texts(render_prompts(prompts, tokenizer), tokenizer)
    response_ids = [[*ids, tokenizer.eos_token_id] for ids in tokenize_texts(responses, tokenizer)]
    ids = [prompt + response for prompt, response in zip(prompt_ids, response_ids)]
    targets = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(ids, prompt_ids)]
    return rows_of_ids(ids, targets, max_length=max_length, truncation=truncation, weights=weights, where=where)


def rows_of_ids(
    ids: Sequence[Sequence[int]],
    targets: Sequence[np.ndarray],
    *,
    max_length: int,
    truncation: str,
    weights: Sequence[float] | np.ndarray | None = None,
    where: str = "row",
) -> TokenRows:
    """Token rows cut to `max_length`; arguments and errors as in `tokenize_pairs`, `targets` as in `TokenRows`."""
    if truncation not in TRUNCATIONS:
        raise UserError(f"data.truncation={truncation!r} is not known; use one of: {', '.join(TRUNCATIONS)}")
    if truncation == "error":
        for i, row in enumerate(ids):
            if len(row) > max_length:
                raise UserError(
                    f"{where} {i} has {len(row)} tokens, more than data.max_length={max_length}; "
                    "raise data.max_length or set data.truncation=left or right"
                )
    rows = TokenRows.from_targets(
        [cut_row(row, max_length, truncation) for row in ids],
        [cut_row(row, max_length, truncation) for row in targets],
        weights,
    )
    empty = int((rows.num_targets <= 0).sum())
    if empty:
        logger.warning("%d of %d rows have no response token left after truncation and train nothing", empty, len(rows))
    return rows


def cut_row(row: Any, max_length: int, side: str) -> Any:
    """The last (`left` cuts on the left) or the first `max_length` entries of a sequence."""
    return row[max(0, len(row) - max_length) :] if side == "left" else row[:max_length]


class TokenRowsDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token rows, each right-padded to `max_length` on access.

    `rows` holds the tokens; `dataset[i]` has `input_ids`, `attention_mask`, `position_ids` and `loss_mask`, each
    (max_length,) int64. Entry t of `loss_mask` stands for the prediction of token t + 1: it is 1 from the token before
    a target to the last but one token of that run of targets.
    """

    def __init__(self, rows: TokenRows, max_length: int, pad_token_id: int) -> None:
        self.rows = rows
        self.max_length = max_length
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        ids = torch.from_numpy(self.rows.row(index).astype(np.int64))
        input_ids = torch.full((self.max_length,), self.pad_token_id, dtype=torch.int64)
        input_ids[: len(ids)] = ids
        loss_mask = torch.zeros(self.max_length, dtype=torch.int64)
        loss_mask[: len(ids) - 1] = torch.from_numpy(self.rows.row_targets(index)[1:].astype(np.int64))
        column = torch.arange(self.max_length)
        return {
            "input_ids": input_ids,
            "attention_mask": (column < len(ids)).long(),
            "position_ids": torch.where(column < len(ids), column, 0),
            "loss_mask": loss_mask,
        }


class SFTDataset(TokenRowsDataset):
    """A parquet file (or several, concatenated) of prompts and responses, tokenised once at construction."""

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
            config: the `data` section, or some of its keys; without it the columns are `prompt` and `response`.
            config_key: key that messages name when a file is missing or broken.

        Raises:
            UserError: a missing file, column or key, a cell of the wrong kind, a row that is too long.
        """
        data = data_section(config)
        frame, where = read_rows(parquet_files, config_key)
        prompt_key, response_key = _one(data.prompt_key, "prompt_key"), _one(data.response_key, "response_key")
        prompts = read_column(frame, prompt_key, "data.prompt_key", where, data.prompt_dict_keys or ())
        responses = read_column(frame, response_key, "data.response_key", where, data.response_dict_keys or ())
        _check_cells(prompts, responses, prompt_key, response_key, where)
        rows = tokenize_pairs(
            prompts,
            responses,
            tokenizer,
            max_length=data.max_length,
            truncation=data.truncation,
            weights=read_weights(frame, data.weight_key, where),
            where=f"{where}: row",
        )
        super().__init__(rows, data.max_length, pad_id(tokenizer))


def data_section(config: SFTDataConfig | Mapping[str, Any] | None) -> SFTDataConfig:
    """`config` as the typed section; keys that a mapping lacks take the values documented at `SFTDataset`."""
    if isinstance(config, SFTDataConfig):
        return config
    return build_config(SFTDataConfig, {**_COLUMNS, **(config or {})})


def read_rows(files: str | Path | Sequence[str | Path], config_key: str) -> tuple[pd.DataFrame, str]:
    """The frame of all files and how messages name them. Raises UserError as `read_parquet`."""
    paths = [files] if isinstance(files, (str, Path)) else list(files)
    return read_parquet(paths, config_key), f"{config_key}={', '.join(map(str, paths))}"


def read_weights(frame: pd.DataFrame, key: str | None, where: str) -> np.ndarray | None:
    """(N,) float32 row weights of column `key`; None without one.

    Raises:
        UserError: no such column, or weights that are negative, not finite or all 0.
    """
    if key is None:
        return None
    weights = np.asarray(read_column(frame, key, "data.weight_key", where), dtype=np.float32)
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
        raise UserError(f"{where}: column {key!r} (data.weight_key) must hold finite weights >= 0, not all 0")
    return weights


def _one(key: str | tuple[str, ...], name: str) -> str:
    if isinstance(key, str):
        return key
    if len(key) != 1:
        raise UserError(f"data.{name}={list(key)} names {len(key)} columns; name one")
    return key[0]


def _check_cells(prompts: list[Any], responses: list[Any], prompt_key: str, response_key: str, where: str) -> None:
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        try:
            as_messages(prompt)
        except ValueError as error:
            raise UserError(f"{where}: row {i}, column {prompt_key!r}: {error}") from error
        if not isinstance(response, str):
            raise UserError(
                f"{where}: row {i}, column {response_key!r} holds a {type(response).__name__}; a response must be text"
            )
