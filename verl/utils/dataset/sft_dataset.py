# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning rows: parquet -> chat template -> token ids, tokenised once and kept in flat arrays."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from verl.utils.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "SFTBatch",
    "SFTDataset",
    "SFTTokenizer",
    "TokenRows",
    "as_messages",
    "collate_rows",
    "render_prompts",
    "tokenize_pairs",
    "tokenize_texts",
]

logger = logging.getLogger(__name__)

TRUNCATIONS = ("error", "left", "right")
_TOKENIZER_BATCH = 1024


class SFTTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this module uses."""

    eos_token_id: int | None
    pad_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclass(frozen=True)
class TokenRows:
    """N tokenised rows in flat arrays.

    tokens: (sum of lengths,) int32, each row = prompt ids followed by response ids (its end token included).
    offsets: (N + 1,) int64, row i is `tokens[offsets[i]:offsets[i + 1]]`.
    prompt_lengths: (N,) int64, tokens of the row that are context only.
    weights: (N,) float32 >= 0, factor of the row's loss.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int64 tokens per row."""
        return np.diff(self.offsets)

    @property
    def num_targets(self) -> np.ndarray:
        """(N,) int64 tokens per row that enter the loss; a row's very first token has nothing to predict it from."""
        return self.lengths - np.maximum(self.prompt_lengths, 1)

    @property
    def num_prompt_targets(self) -> np.ndarray:
        """(N,) int64 prompt tokens per row that can be predicted: all but a row's very first token."""
        return np.maximum(np.minimum(self.prompt_lengths, self.lengths) - 1, 0)

    def row(self, index: int) -> np.ndarray:
        """(L,) int32 ids of one row."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def from_ids(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        weights: Sequence[float] | np.ndarray | None = None,
    ) -> TokenRows:
        """Rows from separate prompt and response ids. Raises ValueError when the counts differ."""
        if len(prompts) != len(responses) or (weights is not None and len(weights) != len(prompts)):
            raise ValueError("prompts, responses and weights must have one entry per row")
        lengths = np.array([len(p) + len(r) for p, r in zip(prompts, responses)], dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        tokens = np.empty(int(offsets[-1]), dtype=np.int32)
        for i, (prompt, response) in enumerate(zip(prompts, responses)):
            start = offsets[i]
            tokens[start : start + len(prompt)] = prompt
            tokens[start + len(prompt) : offsets[i + 1]] = response
        return cls(
            tokens,
            offsets,
            np.array([len(p) for p in prompts], dtype=np.int64),
            np.ones(len(prompts), np.float32) if weights is None else np.asarray(weights, dtype=np.float32),
        )


@dataclass(frozen=True)
class SFTBatch:
    """Rows right-padded to their own longest.

    input_ids: (B, L) int64. attention_mask: (B, L) int64, 1 on real tokens.
    loss_weights: (B, L) float32; entry t is the weight of predicting token t + 1 from the tokens up to t. It is the
        row's weight from the last prompt token to the last but one token of the row, `prompt_loss_weight` times that
        before it, else 0.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_weights: torch.Tensor


def collate_rows(
    rows: TokenRows, indices: Sequence[int] | np.ndarray, pad_token_id: int, prompt_loss_weight: float = 0.0
) -> SFTBatch:
    """One micro-batch, as wide as its longest row.

    An index of -1 stands for a filler row: one pad token without loss, so that ranks with fewer rows can take part
    in collective operations.
    """
    index = np.asarray(indices, dtype=np.int64)
    filler = index < 0
    safe = np.where(filler, 0, index)
    lengths = np.where(filler, 1, rows.lengths[safe])
    width = int(lengths.max())
    column = np.arange(width)
    real = column[None, :] < lengths[:, None]
    source = np.minimum(rows.offsets[safe][:, None] + column[None, :], len(rows.tokens) - 1)
    ids = np.where(real & ~filler[:, None], rows.tokens[source], pad_token_id).astype(np.int64)
    first = np.maximum(rows.prompt_lengths[safe] - 1, 0)
    predicts = column[None, :] < lengths[:, None] - 1
    share = np.where(column[None, :] >= first[:, None], 1.0, prompt_loss_weight)
    weights = np.where(predicts & ~filler[:, None], share * rows.weights[safe][:, None], 0.0).astype(np.float32)
    return SFTBatch(torch.from_numpy(ids), torch.from_numpy(real.astype(np.int64)), torch.from_numpy(weights))


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


def render_prompts(prompts: Sequence[Any], tokenizer: SFTTokenizer) -> list[str]:
    """Prompt texts through the tokenizer's chat template, ending where the assistant's answer starts."""
    return [
        tokenizer.apply_chat_template(as_messages(prompt), tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]


def tokenize_texts(texts: Sequence[str], tokenizer: SFTTokenizer) -> list[list[int]]:
    """Ids per text without added special tokens; the tokenizer is called on batches."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _TOKENIZER_BATCH):
        chunk = list(texts[start : start + _TOKENIZER_BATCH])
        ids.extend(tokenizer(chunk, add_special_tokens=False)["input_ids"])
    return ids


def tokenize_pairs(
    prompts: Sequence[Any],
    responses: Sequence[str],
    tokenizer: SFTTokenizer,
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
    if truncation not in TRUNCATIONS:
        raise UserError(f"data.truncation={truncation!r} is not known; use one of: {', '.join(TRUNCATIONS)}")
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token, so responses could not end; set one in tokenizer_config.json")
    prompt_ids = tokenize_texts(render_prompts(prompts, tokenizer), tokenizer)
    response_ids = [ids + [tokenizer.eos_token_id] for ids in tokenize_texts(responses, tokenizer)]
    for i, (prompt, response) in enumerate(zip(prompt_ids, response_ids)):
        excess = len(prompt) + len(response) - max_length
        if excess <= 0:
            continue
        if truncation == "error":
            raise UserError(
                f"{where} {i} has {len(prompt) + len(response)} tokens, more than data.max_length={max_length}; "
                "raise data.max_length or set data.truncation=left or right"
            )
        prompt_ids[i], response_ids[i] = _cut(prompt, response, max_length, truncation)
    rows = TokenRows.from_ids(prompt_ids, response_ids, weights)
    empty = int((rows.num_targets <= 0).sum())
    if empty:
        logger.warning("%d of %d rows have no response token left after truncation and train nothing", empty, len(rows))
    return rows


def _cut(prompt: list[int], response: list[int], max_length: int, side: str) -> tuple[list[int], list[int]]:
    if side == "right":
        return prompt[:max_length], response[: max(0, max_length - len(prompt))]
    kept = response[-max_length:]
    room = max_length - len(kept)
    return (prompt[-room:] if room > 0 else []), kept


class SFTDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A parquet file (or several, concatenated) of prompts and responses, tokenised once at construction.

    `rows` holds the tokens; `dataset[i]` gives the same row right-padded to `max_length`: `input_ids`,
    `attention_mask`, `position_ids` and `loss_mask`, each (max_length,) int64. `loss_mask` is 1 from the last prompt
    token to the last but one token: entry t stands for the prediction of token t + 1.
    """

    def __init__(
        self,
        parquet_files: str | Path | Sequence[str | Path],
        tokenizer: SFTTokenizer,
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
        prompt_dict_keys: Sequence[str] = (),
        response_dict_keys: Sequence[str] = (),
        max_length: int = 1024,
        truncation: str = "error",
        weight_key: str | None = None,
        config_key: str = "data.train_files",
    ) -> None:
        """Read and tokenise.

        Args:
            parquet_files: path or paths.
            prompt_key, response_key: columns. Cells that are mappings are followed through `*_dict_keys` in turn.
            weight_key: column with row weights, or None.
            config_key: key that messages name when a file is missing or broken.

        Raises:
            UserError: a missing file, column or key, a cell of the wrong kind, a row that is too long.
        """
        paths = [parquet_files] if isinstance(parquet_files, (str, Path)) else list(parquet_files)
        frame = _read_parquet(paths, config_key)
        where = f"{config_key}={', '.join(map(str, paths))}"
        prompts = _column(frame, prompt_key, prompt_dict_keys, "prompt", where)
        responses = _column(frame, response_key, response_dict_keys, "response", where)
        _check_cells(prompts, responses, prompt_key, response_key, where)
        weights = None if weight_key is None else _weights(frame, weight_key, where)
        self.max_length = max_length
        self.pad_token_id = pad_id(tokenizer)
        self.rows = tokenize_pairs(
            prompts,
            responses,
            tokenizer,
            max_length=max_length,
            truncation=truncation,
            weights=weights,
            where=f"{where}: row",
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        length, prompt = int(self.rows.lengths[index]), int(self.rows.prompt_lengths[index])
        input_ids = torch.full((self.max_length,), self.pad_token_id, dtype=torch.int64)
        input_ids[:length] = torch.from_numpy(self.rows.row(index).astype(np.int64))
        column = torch.arange(self.max_length)
        return {
            "input_ids": input_ids,
            "attention_mask": (column < length).long(),
            "position_ids": torch.where(column < length, column, 0),
            "loss_mask": ((column >= max(prompt - 1, 0)) & (column < length - 1)).long(),
        }


def pad_id(tokenizer: SFTTokenizer) -> int:
    """Id used to fill rows: the pad token, else the end token, else 0 (filled positions never reach the loss)."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0


def _read_parquet(paths: Sequence[str | Path], key: str) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    if not paths:
        raise UserError(f"{key} is empty; set it to a parquet file")
    frames = []
    for path in paths:
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(f"{key}={path}: {file} is not a file; set {key} to an existing parquet file")
        try:
            frames.append(pd.read_parquet(file))
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{key}={path}: {file} cannot be read as parquet ({error}); write it again") from error
    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    if len(frame) == 0:
        raise UserError(f"{key}={', '.join(map(str, paths))}: there is no row in it")
    return frame


def _column(frame: pd.DataFrame, key: str, nested: Sequence[str], name: str, where: str) -> list[Any]:
    if key not in frame.columns:
        known = ", ".join(map(str, frame.columns))
        raise UserError(f"{where}: no column {key!r} (data.{name}_key); the columns are: {known}")
    cells = frame[key].tolist()
    for part in nested:
        # Columns without nesting are legal with any *_dict_keys: the shipped defaults name a data set with nesting.
        for i, cell in enumerate(cells):
            if not isinstance(cell, Mapping):
                continue
            if part not in cell:
                known = ", ".join(map(str, cell))
                raise UserError(
                    f"{where}: row {i}, column {key!r} has no {part!r} (data.{name}_dict_keys); it has {known}"
                )
            cells[i] = cell[part]
    return cells


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


def _weights(frame: pd.DataFrame, key: str, where: str) -> np.ndarray:
    if key not in frame.columns:
        raise UserError(f"{where}: no column {key!r} (data.weight_key); the columns are: {', '.join(frame.columns)}")
    weights = np.asarray(frame[key].to_numpy(), dtype=np.float32)
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
        raise UserError(f"{where}: column {key!r} (data.weight_key) must hold finite weights >= 0, not all 0")
    return weights
