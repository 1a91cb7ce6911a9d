# SPDX-License-Identifier: Apache-2.0
"""A catalogue in compiled form: a folder of arrays and record files that every process maps instead of reading."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir, remove_leftovers

__all__ = ["RecordWriter", "Records", "map_array", "open_or_build", "read_meta", "write_meta"]

logger = logging.getLogger(__name__)

_META = "meta.json"


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
    """Write the folder's description; the last thing to be written, as it records the sizes of the other files."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _META).write_text(json.dumps({**meta, "sizes": sizes}, indent=1) + "\n", encoding="utf-8")


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The folder's description; None when the folder is absent or not whole."""
    try:
        meta = json.loads((folder / _META).read_bytes())
        whole = all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if whole else None


def open_or_build(folder: Path, build: Callable[[Path], None]) -> dict[str, Any]:
    """The description of a compiled folder, which is built when it is absent or damaged.

    Several processes may do this at once: each builds for itself and the first to finish wins; a reader never sees
    a part of a folder.

    Raises:
        UserError: the folder cannot be written, or `build` raises it.
    """
    meta = read_meta(folder)
    if meta is not None:
        return meta
    remove_leftovers(folder)
    damaged = folder.exists()
    if damaged:
        logger.warning("%s is damaged and is built again", folder)
    try:
        with atomic_dir(folder, overwrite=damaged) as place:
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
