# SPDX-License-Identifier: Apache-2.0
"""Reading parquet files and their columns with errors that name the file, the row and the config key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.errors import UserError
from verl.utils.fs import require_file

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["count_rows", "read_column", "read_parquet"]


def read_parquet(paths: str | Path | Sequence[str | Path], key: str) -> pd.DataFrame:
    """One frame with the rows of all files in order.

    Raises:
        UserError: a file is missing or no parquet, or there is no row; names `key`.
    """
    import pandas as pd
    import pyarrow as pa

    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not files:
        raise UserError(f"{key} is empty; set it to a parquet file")
    frames = []
    for path in files:
        file = require_file(path, key)
        try:
            frames.append(pd.read_parquet(file))
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{key}={path}: {file} cannot be read as parquet ({error}); write it again") from error
    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    if len(frame) == 0:
        raise UserError(f"{key}={', '.join(map(str, files))}: there is no row in it")
    return frame


def count_rows(paths: str | Path | Sequence[str | Path], key: str) -> int:
    """Rows of placeholder files, of which only the number counts, read from their footers alone.

    Raises:
        UserError: a file is missing or no parquet; names `key`.
    """
    import pyarrow
    import pyarrow.parquet

    total = 0
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        file = Path(path).expanduser()
        try:
            total += int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise UserError(
                f"{key}={path}: {file} cannot be read as a parquet file ({error}); set {key}=null, the environment "
                "then defines the tasks, or name another file"
            ) from error
    return total


def read_column(frame: pd.DataFrame, column: str, key: str, where: str, nested: Sequence[str] = ()) -> list[Any]:
    """Cells of a column; a cell that is a mapping is followed through the keys `nested` in turn.

    Args:
        key: config key that chose the column, for messages (its `_key` ending becomes `_dict_keys` for `nested`).
        where: file and key, for messages.

    Raises:
        UserError: no such column, or a mapping lacks a key.
    """
    if column not in frame.columns:
        known = ", ".join(map(str, frame.columns))
        raise UserError(f"{where}: no column {column!r} ({key}); the columns are: {known}")
    cells = frame[column].tolist()
    for part in nested:
        # Columns without nesting are legal with any *_dict_keys: the shipped defaults name a data set with nesting.
        for i, cell in enumerate(cells):
            if not isinstance(cell, Mapping):
                continue
            if part not in cell:
                known = ", ".join(map(str, cell))
                chosen_by = f"{key.removesuffix('_key')}_dict_keys"
                raise UserError(f"{where}: row {i}, column {column!r} has no {part!r} ({chosen_by}); it has {known}")
            cells[i] = cell[part]
    return cells
