# SPDX-License-Identifier: Apache-2.0
"""What checkpoints of all kinds share: random states, and finding the newest complete folder."""

from __future__ import annotations

import logging
import pickle
import random
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor  # registers sharded tensors with the loader that runs no code

from verl.utils.errors import UserError

__all__ = [
    "TRACKER_FILE",
    "BaseCheckpointManager",
    "complete_steps",
    "find_latest_ckpt_path",
    "get_checkpoint_tracker_filename",
    "read_tensors",
]

logger = logging.getLogger(__name__)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Holds the number of the last complete checkpoint, beside the `global_step_N` folders."""


def read_tensors(path: str | Path, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote: tensors (sharded ones too) on the CPU, in containers of plain values; runs no code.

    Args:
        mmap: leave the tensors in the file until they are used.

    Raises:
        UserError: the file is cut off, damaged, or holds something else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}); it is damaged or no file of a checkpoint") from error


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
        kind, keys, *position = np.random.get_state()
        state: dict[str, Any] = {
            "cpu": torch.get_rng_state(),
            # A tensor, because `read_tensors` takes no arrays.
            "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *position),
            "random": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    @staticmethod
    def load_rng_state(rng_state: dict[str, Any]) -> None:
        """Put back what `get_rng_state` returned; a CUDA state is left out where there is no CUDA."""
        torch.set_rng_state(rng_state["cpu"])
        kind, keys, *position = rng_state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *position))
        random.setstate(rng_state["random"])
        if "cuda" in rng_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng_state["cuda"])


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """File that holds the number of the last complete checkpoint under ``root_path``."""
    return str(Path(root_path) / TRACKER_FILE)


def complete_steps(path: str | Path, directory_format: str = "global_step_{}", marker: str | None = None) -> list[int]:
    """Steps with a complete checkpoint under ``path``, ascending.

    ``marker``: file inside a checkpoint that is written last, as a relative path; None accepts every folder by name.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        return []
    named = re.compile(re.escape(directory_format).replace(re.escape("{}"), r"(\d+)"))
    steps = []
    for folder in root.iterdir():
        match = named.fullmatch(folder.name)
        if match and folder.is_dir() and (marker is None or (folder / marker).is_file()):
            steps.append(int(match[1]))
    return sorted(steps)


def find_latest_ckpt_path(
    path: str | Path | None, directory_format: str = "global_step_{}", marker: str | None = None
) -> str | None:
    """Folder of the last complete checkpoint under ``path``, or None where there is none.

    The tracker file decides, because the folder may hold higher steps of an earlier run. Where it names no complete
    checkpoint (a crash may fall between the folder's rename and the tracker) the newest complete one is taken; without
    a ``marker`` (see `complete_steps`) nothing tells a whole folder from a part, so the tracker alone counts.
    """
    if path is None:
        return None
    root = Path(path).expanduser()
    steps = complete_steps(root, directory_format, marker)
    tracked = _tracked_step(root)
    if tracked in steps:
        return str(root / directory_format.format(tracked))
    newest = steps[-1] if steps and marker is not None else None
    if tracked is not None:
        logger.warning(
            "%s names step %d, whose folder is missing or incomplete; the newest complete checkpoint is %s",
            root / TRACKER_FILE,
            tracked,
            "none" if newest is None else f"that of step {newest}",
        )
    return None if newest is None else str(root / directory_format.format(newest))


def _tracked_step(root: Path) -> int | None:
    tracker = root / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        logger.warning("%s holds %r instead of a step number; ignored", tracker, text[:40])
        return None
    return int(text)
