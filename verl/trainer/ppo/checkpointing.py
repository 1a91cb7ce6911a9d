# SPDX-License-Identifier: Apache-2.0
"""Folders of a run's checkpoints: written aside, renamed when whole, found again, rotated.

``{root}/global_step_{N}/{actor/, critic/, hooks/<name>/, trainer_state.json}``. A folder has its final name only when
it is complete, and ``trainer_state.json`` is the last file written into it, so whatever a crash leaves behind is never
mistaken for a checkpoint. ``{root}/latest_checkpointed_iteration.txt`` names the step to resume from.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import TRACKER_FILE as LATEST_FILE
from verl.utils.checkpoint.checkpoint_manager import complete_steps, find_latest_ckpt_path
from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir, atomic_write

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
STATE_VERSION = 1
_LEFTOVER = re.compile(r"global_step_\d+\.tmp-.*")


@dataclass(frozen=True)
class TrainerState:
    """The driver's state at the end of a step.

    ``epoch``: completed passes over the prompts. ``task_stream``: position of the training environments' task stream.
    ``hooks``: ``state_dict()`` of every hook, by name.
    """

    global_step: int
    epoch: int
    world_size: int
    kl_controller: dict[str, float]
    task_stream: dict[str, Any]
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = STATE_VERSION


class CheckpointStore:
    """Checkpoints below ``root``.

    ``keep``: part (a folder in a checkpoint) -> in how many checkpoints it stays after a save, the new one counted;
    None: in all. A checkpoint that lost a part can still be exported, but not resumed from; one without parts goes.
    """

    def __init__(self, root: str | Path, keep: Mapping[str, int | None] = MappingProxyType({"actor": None})) -> None:
        self.root = Path(root).expanduser()
        self.keep = dict(keep)

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def save(self, state: TrainerState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint: ``write(folder)`` fills it, then it gets its name, then older ones are rotated out.

        A crash at any point leaves the previous checkpoint usable and chosen. A folder of the same step (of a run
        that was rolled back) is replaced.
        """
        target = self.folder(state.global_step)
        with atomic_dir(target, overwrite=True) as folder:
            write(folder)
            atomic_write(folder / STATE_FILE, json.dumps(asdict(state), indent=1, allow_nan=False) + "\n")
        self._point_to(state.global_step)
        self._rotate(state.global_step)
        return target

    def find(self, resume_mode: str, resume_from_path: str | None) -> Path | None:
        """The checkpoint to resume from, or None for a fresh start.

        ``auto``: the step named by the latest file, else the newest complete folder (a crash may fall between the
        rename and the latest file). ``resume_path``: that folder. ``disable``: None.

        Raises:
            UserError: ``resume_path`` without a complete checkpoint there.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            return self._given(resume_from_path)
        latest = find_latest_ckpt_path(self.root, marker=STATE_FILE)
        return None if latest is None else Path(latest)

    def complete_steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return complete_steps(self.root, marker=STATE_FILE)

    def _given(self, path: str | None) -> Path:
        key = "trainer.resume_from_path"
        if path is None:
            raise UserError(f"trainer.resume_mode=resume_path needs {key}, a folder named global_step_N")
        folder = Path(path).expanduser()
        if not (folder / STATE_FILE).is_file():
            raise UserError(
                f"{key}={path}: no complete checkpoint there ({folder / STATE_FILE} is missing); "
                "give a folder named global_step_N, or set trainer.resume_mode=auto"
            )
        return folder

    def _point_to(self, step: int) -> None:
        atomic_write(self.root / LATEST_FILE, f"{step}\n")

    def _rotate(self, newest: int) -> None:
        """Remove what a killed save left, and each part of the oldest checkpoints beyond its number."""
        for folder in self.root.iterdir():
            if _LEFTOVER.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        older = [step for step in complete_steps(self.root) if step < newest][::-1]
        for step, parts in self._surplus(older).items():
            folder = self.folder(step)
            if all(part in parts or not (folder / part).is_dir() for part in self.keep):
                # Renamed first: a kill while deleting must not leave a folder that looks complete.
                doomed = self.root / f"global_step_{step}.tmp-rotated"
                folder.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                continue
            # First of all it must not look like a checkpoint any more: without a part no run can go on from it.
            (folder / STATE_FILE).unlink(missing_ok=True)
            for name in (*parts, "hooks"):
                shutil.rmtree(folder / name, ignore_errors=True)

    def _surplus(self, older: Sequence[int]) -> dict[int, list[str]]:
        """Parts to remove by step; ``older`` are the steps before the newest one, newest first."""
        surplus: dict[int, list[str]] = {}
        for part, limit in self.keep.items():
            having = [step for step in older if (self.folder(step) / part).is_dir()]
            for step in having[limit - 1 :] if limit is not None else ():
                surplus.setdefault(step, []).append(part)
        return surplus


def load_state(folder: Path) -> TrainerState:
    """Read a checkpoint's trainer state.

    Raises:
        UserError: the file is damaged or of another version.
    """
    path = folder / STATE_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["version"]
        state = TrainerState(**raw) if version == STATE_VERSION else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); resume from another checkpoint") from error
    if state is None:
        raise UserError(f"{path} has version {version}, this program reads {STATE_VERSION}")
    return state
