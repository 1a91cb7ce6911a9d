# SPDX-License-Identifier: Apache-2.0
"""Finished trajectories of an unfinished analysis, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from agent_system.step_discriminator.trajectory_analyzer.label import TrajectoryJob
from agent_system.step_discriminator.trajectory_analyzer.records import (
    ANALYSIS_VERSION,
    CreditOptions,
    CreditRecord,
)
from verl.utils.errors import UserError

__all__ = ["Journal", "job_key"]

logger = logging.getLogger(__name__)


def job_key(job: TrajectoryJob, options: CreditOptions) -> str:
    """Everything the result depends on, as 32 hex digits: changed input or options never meet an old entry."""
    content = {
        "version": ANALYSIS_VERSION,
        "options": options.as_dict(),
        "traj_uid": job.traj_uid,
        "task": dict(job.task),
        "success": job.success,
        "task_score": job.task_score,
        "actions": list(job.actions),
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


class Journal:
    """Append-only lines `{"key": ..., "record": ...}`; a context manager that holds the file's lock.

    A last line cut short by a kill is dropped on opening. Only one process may hold a journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, CreditRecord] = {}

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self._file = open(self.path, "a+b")
            self._lock()
            if os.fstat(self._file.fileno()).st_nlink:
                break
            # The analysis that held the lock until a moment ago has removed this file; its successor is needed.
            self._file.close()
        self._read()
        return self

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"{self.path} is in use by another analysis with the same output; wait for it or choose another "
                "--out-dir."
            ) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Before the lock is gone: the file may be another's afterwards.
        if self._file.tell() == 0:
            self.remove()
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        valid = 0
        for line in self._file:
            entry = _parse(line)
            if entry is None:
                break
            valid += len(line)
            self._entries[entry[0]] = entry[1]
        self._file.truncate(valid)
        self._file.seek(0, os.SEEK_END)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> CreditRecord | None:
        """The finished record of `job_key`, if there is one."""
        return self._entries.get(key)

    def add(self, key: str, record: CreditRecord) -> None:
        """Append and hand to the operating system, so that a killed process loses nothing that was added."""
        line = json.dumps({"key": key, "record": record.as_dict()}, ensure_ascii=True) + "\n"
        self._file.write(line.encode("ascii"))
        self._file.flush()
        self._entries[key] = record

    def remove(self) -> None:
        """Delete the file: the output that it served is written."""
        self.path.unlink(missing_ok=True)


def _parse(line: bytes) -> tuple[str, CreditRecord] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        data: dict[str, Any] = json.loads(line)
        return str(data["key"]), CreditRecord.from_dict(data["record"])
    except (ValueError, KeyError, TypeError):
        logger.warning("the journal has an unreadable line; what follows it is analysed again")
        return None
