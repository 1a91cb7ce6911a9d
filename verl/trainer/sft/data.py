# SPDX-License-Identifier: Apache-2.0
"""From the `data` section of the SFT config to token rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl.trainer.config.schema import SFTDataConfig
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.sft_dataset import SFTDataset, TokenRowsDataset
from verl.utils.dataset.token_rows import TokenRows
from verl.utils.errors import UserError
from verl.utils.import_utils import load_extern_type

__all__ = ["create_sft_dataset", "token_rows"]

_COLUMNS = ("input_ids", "attention_mask", "loss_mask")


def create_sft_dataset(
    data_paths: str | Sequence[str], data_config: SFTDataConfig, tokenizer: Any, config_key: str = "data.train_files"
) -> Any:
    """The data set that the `data` section describes, read from `data_paths`.

    `data.custom_cls` wins: its class is called with `parquet_files, tokenizer, config` (the section as an OmegaConf
    tree) and yields what `TokenRowsDataset` yields. Else `data.multiturn.enable` chooses between whole conversations
    and prompt-response pairs.

    Raises:
        UserError: missing or unsuitable files, columns or class.
    """
    custom = data_config.custom_cls
    if custom.path is not None:
        cls = load_extern_type(custom.path, custom.name, "data.custom_cls")
        tree = OmegaConf.create({key: value for key, value in asdict(data_config).items() if value is not None})
        return cls(parquet_files=data_paths, tokenizer=tokenizer, config=tree)
    kind = MultiTurnSFTDataset if data_config.multiturn.enable else SFTDataset
    return kind(data_paths, tokenizer, data_config, config_key=config_key)


def token_rows(dataset: Any, data_config: SFTDataConfig) -> TokenRows:
    """The rows of a data set of `create_sft_dataset` without their padding.

    Raises:
        UserError: a user's class gives items without `input_ids`, `attention_mask` and `loss_mask` of equal length.
    """
    if isinstance(dataset, TokenRowsDataset):
        return dataset.rows
    ids, targets = [], []
    for i in range(len(dataset)):
        item = dataset[i]
        columns = [torch.as_tensor(item[name]) for name in _COLUMNS if name in item]
        if len(columns) != len(_COLUMNS) or len({tuple(column.shape) for column in columns}) != 1:
            name, wanted = data_config.custom_cls.name, ", ".join(_COLUMNS)
            raise UserError(f"data.custom_cls.name={name}: item {i} must hold {wanted} of equal length")
        input_ids, attention_mask, loss_mask = columns
        real = attention_mask.bool()
        # Entry t of a loss mask stands for the prediction of token t + 1.
        follows = np.concatenate([np.zeros(1, dtype=bool), loss_mask[real].bool().numpy()[:-1]])
        ids.append(input_ids[real].numpy())
        targets.append(follows)
    return TokenRows.from_targets(ids, targets)
