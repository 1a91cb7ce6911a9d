# SPDX-License-Identifier: Apache-2.0
"""Data sets of the training programs. Classes are found on first use, so importing the package stays cheap."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["SFTDataset"]

_HOMES = {"SFTDataset": "verl.utils.dataset.sft_dataset"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
