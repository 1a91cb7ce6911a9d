# SPDX-License-Identifier: Apache-2.0
"""Prompts of a parquet file as rows of token ids, for programs that read prompts from files.

Training in environments does not: there the environment gives the prompts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.trainer.config.builder import build_config
from verl.trainer.config.run_sections import DataConfig
from verl.utils.dataset.chat import ChatTokenizer, as_messages, pad_id, render_prompts, tokenize_texts
from verl.utils.dataset.parquet import read_column, read_parquet
from verl.utils.errors import UserError
from verl.utils.model import compute_position_id_with_mask
from verl.utils.torch_functional import postprocess_data

__all__ = ["RLHFDataset", "collate_fn"]

logger = logging.getLogger(__name__)


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as columns: tensors stacked to (B, ...), everything else an object array of B entries."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in data_list:
        for name, value in row.items():
            columns[name].append(value)
    batch: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values[0], torch.Tensor):
            batch[name] = torch.stack(values)
        else:
            batch[name] = np.empty(len(values), dtype=object)
            batch[name][:] = values
    return batch


class RLHFDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Text prompts through the chat template, left-padded to `max_prompt_length` P.

    A row has `input_ids`, `attention_mask`, `position_ids`, each (P,) int64; `raw_prompt_ids`, the ids without padding;
    `raw_prompt`, the messages, with `return_raw_chat`; `index` and `tools_kwargs` of `extra_info`; and every other
    column as it is.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: ChatTokenizer,
        config: DataConfig | Mapping[str, Any],
        processor: Any | None = None,
    ) -> None:
        """Read and tokenise.

        Args:
            data_files: parquet path or paths.
            config: the `data` section of the RL config, or some of its keys.
            processor: must be None: images are not part of this package.

        Raises:
            UserError: a processor; a missing file or column; a prompt that is too long under `truncation=error`.
        """
        if processor is not None:
            raise UserError("prompts with images are not part of this package; pass processor=None")
        self.config = config if isinstance(config, DataConfig) else build_config(DataConfig, config)
        self.pad_token_id = pad_id(tokenizer)
        frame = read_parquet(data_files, "data.train_files")
        cells = read_column(frame, self.config.prompt_key, "data.prompt_key", str(data_files))
        try:
            self._messages = [as_messages(cell) for cell in cells]
        except ValueError as error:
            raise UserError(f"{data_files}: column {self.config.prompt_key!r} (data.prompt_key): {error}") from error
        texts = render_prompts(cells, tokenizer, self.config.apply_chat_template_kwargs)
        self._ids = tokenize_texts(texts, tokenizer)
        self._rows = frame.drop(columns=[self.config.prompt_key]).to_dict("records")
        self._kept = [i for i in range(len(frame)) if self._is_kept(i)]
        if len(self._kept) < len(frame):
            logger.info("%d of %d prompts are too long and left out", len(frame) - len(self._kept), len(frame))

    def _is_kept(self, row: int) -> bool:
        return not self.config.filter_overlong_prompts or len(self._ids[row]) <= self.config.max_prompt_length

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self._kept[item]
        ids, limit = torch.tensor(self._ids[index], dtype=torch.int64)[None], self.config.max_prompt_length
        if ids.shape[1] > limit and self.config.truncation == "error":
            raise UserError(
                f"prompt {index} has {ids.shape[1]} tokens, more than data.max_prompt_length={limit}; raise it or set "
                "data.truncation or data.filter_overlong_prompts"
            )
        input_ids, mask = postprocess_data(
            ids, torch.ones_like(ids), limit, self.pad_token_id, True, self.config.truncation
        )
        row = dict(self._rows[index])
        extra = row.get("extra_info") or {}
        row |= {
            "input_ids": input_ids[0],
            "attention_mask": mask[0],
            "position_ids": compute_position_id_with_mask(mask[0]),
            "raw_prompt_ids": input_ids[0][mask[0].bool()].tolist(),
            "index": extra.get("index", 0),
            "tools_kwargs": extra.get("tools_kwargs", {}),
        }
        if self.config.return_raw_chat:
            row["raw_prompt"] = self._messages[index]
        return row
