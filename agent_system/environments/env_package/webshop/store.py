# SPDX-License-Identifier: Apache-2.0
"""A catalogue in compiled form: a folder of arrays and record files that every process maps instead of reading."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir, remove_leftovers

__all__ = ["RecordWriter", "Records", "map_array", "open_or_build", "read_meta", "write_meta"]

logger = logging.getLogger(__name__)

_META = "meta.json"
# A file is summed whole up to _BLOCKS * _BLOCK bytes (64 MiB); of a larger one, so many blocks from start to end, so
# that opening a shop of gigabytes does not read what mapping it leaves on the disk.
_BLOCK = 1 << 20
_BLOCKS = 64


class Records:
    """JSON values by number, decoded one at a time from a mapped file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._bytes = map_array(folder, f"{name}_bytes")
        self._starts = map_array(folder, f"{name}_starts")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Any:
        return json.loads(self._bytes[self._starts[number] : self._starts[number + 1]].tobytes())


class RecordWriter:
    """Writes the file pair of a `Records`, value by value; complete when its block ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._starts = [0]

    def __enter__(self) -> RecordWriter:
        self._file = (self._folder / f"{self._name}_bytes.npy").open("wb")
        # The header has a fixed size and is written again once the length is known.
        _write_header(self._file, 0)
        return self

    def add(self, value: Any) -> None:
        """Append a JSON value; it gets the next number."""
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        self._file.write(text)
        self._starts.append(self._starts[-1] + len(text))

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            _write_header(self._file, self._starts[-1])
        np.save(self._folder / f"{self._name}_starts.npy", np.array(self._starts, np.int64))


def _write_header(file: BinaryIO, length: int) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)


def map_array(folder: Path, name: str) -> NDArray[Any]:
    """An array of the folder, mapped read-only."""
    mapped = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    return np.asarray(mapped)  # the plain class is faster to slice


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    """Write the folder's description; the last thing to be written, as it records sizes and sums of the files."""
    record = {**meta, "files": {path.name: _state(path) for path in sorted(folder.iterdir())}}
    text = json.dumps({"meta": record, "sum": _sum_of_meta(record)}, indent=1)
    (folder / _META).write_text(text + "\n", encoding="utf-8")


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The folder's description; None when the folder is absent or damaged.

    Files of up to 64 MiB are read whole, once per process; of larger ones, 64 blocks of 1 MiB.
    """
    try:
        found = json.loads((folder / _META).read_bytes())
        meta: dict[str, Any] = found["meta"]
        whole = found["sum"] == _sum_of_meta(meta)
        whole = whole and all(_state(folder / name) == state for name, state in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if whole else None


def _sum_of_meta(meta: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode("ascii"))


def _state(path: Path) -> list[int]:
    """Size in bytes and checksum."""
    status = path.stat()
    return [status.st_size, _checksum(path, status.st_size, status.st_mtime_ns)]


@lru_cache(maxsize=256)
def _checksum(path: Path, size: int, modified: int) -> int:
    """CRC-32, once per process for a file that keeps its size and time."""
    last = max(size - _BLOCK, 0)
    starts = range(0, size, _BLOCK) if size <= _BLOCKS * _BLOCK else np.linspace(0, last, _BLOCKS, dtype=int).tolist()
    checksum = 0
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            checksum = zlib.crc32(file.read(_BLOCK), checksum)
    return checksum


def _discard(folder: Path) -> None:
    """Remove a damaged folder before the build; one that another process has built in the meantime stays.

    Who holds the lock sees either the damaged folder, which nothing but a discard takes away, or none, or a whole one.
    """
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems that cannot lock a folder: the race is a matter of milliseconds
            fcntl.flock(parent, fcntl.LOCK_EX)
        if folder.exists() and read_meta(folder) is None:
            aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-{os.getpid()}-", dir=folder.parent))
            os.replace(folder, aside / folder.name)
            shutil.rmtree(aside)
    finally:
        os.close(parent)


def open_or_build(folder: Path, build: Callable[[Path], None]) -> dict[str, Any]:
    """The description of a compiled folder, which is built when it is absent or damaged.

    Several processes may do this at once: each builds for itself and the first to finish wins; a reader never sees
    a part of a folder, nor does a whole one vanish.

    Raises:
        UserError: the folder cannot be written, or `build` raises it.
    """
    existed = folder.exists()
    meta = read_meta(folder)
    if meta is not None:
        return meta
    if existed:
        # It appears whole, so that what was there before the look and is not whole will never be.
        logger.warning("%s is damaged and is built again", folder)
    try:
        remove_leftovers(folder)
        if existed:
            _discard(folder)
        with atomic_dir(folder) as place:
            build(place)
    except OSError as error:
        # Another process may have put the same folder there in the meantime.
        meta = read_meta(folder)
        if meta is None:
            raise UserError(
                f"The compiled catalogue {folder} cannot be written ({error}); set XDG_CACHE_HOME to another place."
            ) from error
        return meta
    meta = read_meta(folder)
    if meta is None:
        raise RuntimeError(f"{folder} is damaged although it was just built; check the disk")
    return meta
