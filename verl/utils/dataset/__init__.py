# SPDX-License-Identifier: Apache-2.0
"""Data sets of the training programs. Classes are found on first use, so importing the package stays cheap."""

from __future__ import annotations

import importlib
from typing import Any

from verl.utils.absent import absent_name

__all__ = ["MultiTurnSFTDataset", "RLHFDataset", "SFTDataset"]

_HOMES = {
    "MultiTurnSFTDataset": "verl.utils.dataset.multiturn_sft_dataset",
    "RLHFDataset": "verl.utils.dataset.rl_dataset",
    "SFTDataset": "verl.utils.dataset.sft_dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        absent_name(__name__, name)
    return getattr(importlib.import_module(_HOMES[name]), name)
