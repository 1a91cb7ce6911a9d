# SPDX-License-Identifier: Apache-2.0
"""What checkpoints of all kinds share: random states, and finding the newest complete folder."""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["TRACKER_FILE", "BaseCheckpointManager", "find_latest_ckpt_path", "get_checkpoint_tracker_filename"]

logger = logging.getLogger(__name__)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Holds the number of the last complete checkpoint, beside the `global_step_N` folders."""


class BaseCheckpointManager(ABC):
    """Saves and restores one role on every rank."""

    @abstractmethod
    def save_checkpoint(self, local_path: str | Path, global_step: int = 0) -> None:
        """Write this rank's part into the folder ``local_path``, which is made if missing; a collective."""

    @abstractmethod
    def load_checkpoint(self, local_path: str | Path | None) -> None:
        """Restore this rank's part; None does nothing; a collective."""

    @staticmethod
    def get_rng_state() -> dict[str, Any]:
        """States of the process-wide generators: ``cpu, numpy, random`` and, with CUDA, ``cuda``."""
        state: dict[str, Any] = {
            "cpu": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    @staticmethod
    def load_rng_state(rng_state: dict[str, Any]) -> None:
        """Put back what `get_rng_state` returned; a CUDA state is left out where there is no CUDA."""
        torch.set_rng_state(rng_state["cpu"])
        np.random.set_state(rng_state["numpy"])
        random.setstate(rng_state["random"])
        if "cuda" in rng_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng_state["cuda"])


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """File that holds the number of the last complete checkpoint under ``root_path``."""
    return str(Path(root_path) / TRACKER_FILE)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """Folder of the last complete checkpoint under ``path``, or None where there is none."""
    if path is None:
        return None
    tracker = Path(get_checkpoint_tracker_filename(path))
    if not tracker.is_file():
        return None
    folder = Path(path) / directory_format.format(int(tracker.read_text(encoding="utf-8").strip()))
    if not folder.is_dir():
        logger.warning("%s names %s, which does not exist", tracker, folder)
        return None
    return str(folder)
