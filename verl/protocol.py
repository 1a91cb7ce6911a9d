# SPDX-License-Identifier: Apache-2.0
"""`DataProto`: the record that carries a batch between driver, workers and environments.

A record has three parts: `batch` (tensors that share the leading dimension), `non_tensor_batch` (numpy arrays, normally
of dtype object, with the same number of rows) and `meta_info` (a plain dict about the whole batch, shared by reference
between a record and everything sliced from it).
"""

from __future__ import annotations

import copy
import io
import logging
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from tensordict import TensorDict

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

logger = logging.getLogger(__name__)

Index = list[int] | list[bool] | np.ndarray | torch.Tensor


class _DataProtoConfigMeta(type):
    """Makes `DataProtoConfig.auto_padding` a switch on the class itself."""

    _auto_padding: bool = False

    @property
    def auto_padding(cls) -> bool:
        value = os.environ.get("VERL_AUTO_PADDING", "").strip().lower()
        return cls._auto_padding or value in ("1", "true", "yes", "on")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"DataProtoConfig.auto_padding must be a bool, got {type(enabled).__name__}")
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Process-wide switch for auto padding; also on when the environment variable `VERL_AUTO_PADDING` is 1/true."""

    auto_padding_key = "_verl_auto_padding"


def _object_array(values: Iterable[Any]) -> np.ndarray:
    """1-d object array, one element a row (`np.array` would turn equally long lists into a matrix)."""
    rows = list(values)
    out = np.empty(len(rows), dtype=object)
    for i, value in enumerate(rows):
        out[i] = value
    return out


def _equal(a: Any, b: Any) -> bool:
    """Value equality for tensors, arrays and what object arrays hold; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor | np.ndarray | list | tuple | dict) or isinstance(b, torch.Tensor | np.ndarray):
        if type(a) is not type(b):
            return False
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and a.equal(b)
        if isinstance(a, np.ndarray):
            if a.dtype == object or b.dtype == object:
                return a.shape == b.shape and all(map(_equal, a.flat, b.flat))
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) or bool(a != a and b != b)


def _assert_no_conflict(left: Any, right: Any, where: str) -> None:
    for key in set(left.keys()) & set(right.keys()):
        assert _equal(left[key], right[key]), f"union: {where} key {key!r} is in both records with different values"


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the columns of the second to the first, in place; equal names must hold equal tensors (AssertionError)."""
    sizes = tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)
    assert sizes[0] == sizes[1], f"union: batch sizes {sizes[0]} and {sizes[1]} differ"
    _assert_no_conflict(tensor_dict1, tensor_dict2, "batch")
    return tensor_dict1.update({k: v for k, v in tensor_dict2.items() if k not in _columns(tensor_dict1)})


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second dict to the first, in place; equal names must hold equal values (NaN equals NaN)."""
    for key, value in tensor_dict2.items():
        assert isinstance(value, np.ndarray), f"union: non_tensor_batch[{key!r}] is {type(value).__name__}, not ndarray"
    _assert_no_conflict(tensor_dict1, tensor_dict2, "non_tensor_batch")
    tensor_dict1.update({k: v for k, v in tensor_dict2.items() if k not in tensor_dict1})
    return tensor_dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """`[{a: 1}, {a: 2}]` -> `{a: [1, 2]}`; all dicts must have the same keys."""
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for i, row in enumerate(list_of_dict):
        assert row.keys() == keys, f"entry {i} has keys {sorted(row)}, the first one {sorted(keys)}"
    return {key: [row[key] for row in list_of_dict] for key in keys}


@dataclass(eq=False)
class DataProtoItem:
    """One row of a `DataProto`: a `TensorDict` without batch dimension and plain values."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """A batch: tensors, numpy columns and meta information (see the module's docstring).

    Construction checks that the tensors have one batch dimension and that every numpy column is an ndarray of the same
    number of rows (AssertionError otherwise).
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def check_consistency(self) -> None:
        """AssertionError unless all columns agree on the number of rows."""
        if self.batch is not None:
            dims = len(self.batch.batch_size)
            assert dims == 1, f"DataProto.batch must have one batch dimension, got {tuple(self.batch.batch_size)}"
        rows = len(self)
        for key, value in self.non_tensor_batch.items():
            assert isinstance(value, np.ndarray), (
                f"non_tensor_batch[{key!r}] must be a numpy array, got {type(value).__name__}"
            )
            assert value.ndim >= 1 and value.shape[0] == rows, (
                f"non_tensor_batch[{key!r}] has shape {value.shape}, the batch has {rows} rows"
            )

    # ---- construction -------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Tensors go to `batch`, ndarrays to `non_tensor_batch`; anything else raises ValueError."""
        tensors: dict[str, torch.Tensor] = {}
        arrays: dict[str, Any] = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                raise ValueError(f"{key!r} is a {type(value).__name__}; a DataProto holds tensors and numpy arrays")
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build from columns; non-array entries of `non_tensors` become object arrays with one element a row.

        All tensors must share the first `num_batch_dims` dimensions. `auto_padding` marks this record so that it may be
        split over any number of ranks.
        """
        tensors, non_tensors, meta = tensors or {}, non_tensors or {}, {} if meta_info is None else meta_info
        assert num_batch_dims > 0, f"num_batch_dims must be at least 1, got {num_batch_dims}"
        assert not non_tensors or num_batch_dims == 1, "numpy columns need num_batch_dims=1"
        batch_size: torch.Size | None = None
        for key, value in tensors.items():
            shape = value.shape[:num_batch_dims]
            assert len(shape) == num_batch_dims, f"{key!r} of shape {tuple(value.shape)} lacks a batch dimension"
            assert batch_size is None or shape == batch_size, (
                f"{key!r} starts with dimensions {tuple(shape)}, the columns before it with {tuple(batch_size or ())}"
            )
            batch_size = shape
        arrays = {k: v if isinstance(v, np.ndarray) else _object_array(v) for k, v in non_tensors.items()}
        if auto_padding:
            meta = {**meta, DataProtoConfig.auto_padding_key: True}
        batch = None if batch_size is None else TensorDict(dict(tensors), batch_size=batch_size)
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    def _like(self, batch: TensorDict | None, arrays: dict[str, np.ndarray]) -> DataProto:
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    # ---- rows ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(value) for value in self.non_tensor_batch.values()), 0)

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: slice | Index) -> DataProto: ...
    def __getitem__(self, item: int | np.integer | slice | Index) -> DataProtoItem | DataProto:
        """An int gives one row as `DataProtoItem`; a slice, index list/array/tensor or boolean mask a `DataProto`."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            batch = None if self.batch is None else self.batch[int(item)]
            return DataProtoItem(batch, {k: v[item] for k, v in self.non_tensor_batch.items()}, self.meta_info)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        raise TypeError(f"a DataProto is indexed by int, slice, list, ndarray or tensor, not {type(item).__name__}")

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows `[start:end:step]` as views."""
        rows = slice(start, end, step)
        if step is not None and step < 0:  # tensors cannot be sliced backwards
            return self.select_idxs(np.arange(len(self))[rows])
        batch = None if self.batch is None else self.batch[rows]
        return self._like(batch, {k: v[rows] for k, v in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Index) -> DataProto:
        """Rows by integer positions (negative allowed, repeats allowed) or by a boolean mask of length `len(self)`."""
        index = np.asarray(idxs.cpu() if isinstance(idxs, torch.Tensor) else idxs)
        if index.dtype == bool:
            assert index.shape == (len(self),), f"mask of shape {index.shape} for a batch of {len(self)} rows"
        elif index.size and index.dtype.kind not in "iu":
            raise TypeError(f"rows are selected by integers or booleans, not {index.dtype}")
        positions = np.arange(len(self))[
            index if index.size else np.empty(0, dtype=np.int64)
        ]  # checks the range, resolves masks and negatives
        batch = None if self.batch is None else self.batch[torch.from_numpy(positions)]
        return self._like(batch, {k: v[positions] for k, v in self.non_tensor_batch.items()})

    def reorder(self, indices: torch.Tensor) -> None:
        """Put the rows into the order given by a permutation tensor, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: AABB when interleaved, else ABAB."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Row i `repeat_times[i]` times, copies side by side."""
        times = torch.as_tensor(repeat_times).to(torch.int64).cpu()
        assert times.shape == (len(self),), f"repeat_times has shape {tuple(times.shape)}, the batch {len(self)} rows"
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Split the second dimension of the named columns into `n_split` rows each; other columns are repeated AABB."""
        names = set(split_keys or ())

        def unfold(key: str, value: Any, repeat: Callable[[Any], Any]) -> Any:
            if key not in names:
                return repeat(value)
            width = value.shape[1]
            assert width % n_split == 0, f"column {key!r} is {width} wide, not divisible by n_split={n_split}"
            return value.reshape(value.shape[0] * n_split, width // n_split, *value.shape[2:])

        batch = None
        if self.batch is not None:
            columns = {k: unfold(k, v, lambda t: t.repeat_interleave(n_split, 0)) for k, v in self.batch.items()}
            batch = TensorDict(columns, batch_size=[len(self) * n_split])
        arrays = {k: unfold(k, v, lambda a: a.repeat(n_split, 0)) for k, v in self.non_tensor_batch.items()}
        return self._like(batch, arrays)

    # ---- columns ------------------------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors, in place; returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A record with the named columns (None = all), sharing memory unless `deepcopy`."""
        batch = self.batch
        if batch is not None:
            batch = batch.copy() if batch_keys is None else batch.select(*batch_keys)
        array_keys = self.non_tensor_batch if non_tensor_batch_keys is None else non_tensor_batch_keys
        arrays = {k: self.non_tensor_batch[k] for k in array_keys}
        meta = self.meta_info if meta_info_keys is None else {k: self.meta_info[k] for k in meta_info_keys}
        if deepcopy:
            batch = None if batch is None else batch.clone()
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove the named entries and return them as a record (None = none); AssertionError for a missing one."""
        parts: tuple[Any, ...] = ({} if self.batch is None else self.batch, self.non_tensor_batch, self.meta_info)
        wanted = [list(keys or ()) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        for part, keys in zip(parts, wanted, strict=True):
            missing = set(keys) - set(part.keys())
            assert not missing, f"pop: no entry {sorted(missing)} among {sorted(part.keys())}"
        tensors, arrays, meta = ({k: part.pop(k) for k in keys} for part, keys in zip(parts, wanted, strict=True))
        return type(self).from_dict(tensors, arrays, meta)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename tensor columns, in place; returns self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old names for {len(new)} new ones")
        if self.batch is None:
            raise ValueError("rename: this DataProto has no tensors")
        columns = [self.batch.pop(k) for k in old]
        for name, column in zip(new, columns, strict=True):
            self.batch[name] = column
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the other record's columns and meta information, in place; returns self.

        AssertionError when a name is in both with different values; this record is unchanged then.
        """
        assert not _has_columns(self) or not _has_columns(other) or len(self) == len(other), (
            f"union: {len(self)} rows and {len(other)} rows"
        )
        if self.batch is not None and other.batch is not None:
            _assert_no_conflict(self.batch, other.batch, "batch")
        _assert_no_conflict(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        _assert_no_conflict(self.meta_info, other.meta_info, "meta_info")
        if self.batch is None:
            self.batch = None if other.batch is None else other.batch.copy()
        elif other.batch is not None:
            union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch = {**other.non_tensor_batch, **self.non_tensor_batch}
        self.meta_info.update({k: v for k, v in other.meta_info.items() if k not in self.meta_info})
        return self

    # ---- splitting and joining ----------------------------------------------------------------------------------

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches in order, `epochs` times over; the batch must divide (AssertionError).

        `dataloader_kwargs={"shuffle": True}` draws the order from a generator of its own (seed 0 when None is given).
        """
        assert len(self) % mini_batch_size == 0, (
            f"{len(self)} rows cannot be split into mini-batches of {mini_batch_size}"
        )
        loader: torch.utils.data.DataLoader[DataProto] = torch.utils.data.DataLoader(
            _Rows(self),
            batch_size=mini_batch_size,
            collate_fn=_identity,
            generator=torch.Generator().manual_seed(0 if seed is None else seed),
            **(dataloader_kwargs or {}),
        )
        for _ in range(epochs):
            yield from loader

    def is_padding_enabled(self) -> bool:
        """Whether this record may be split unevenly (process-wide switch or this record's own mark)."""
        return DataProtoConfig.auto_padding or bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append `padding_size` copies of the first or the last row, in place."""
        if padding_candidate not in ("first", "last", ""):
            raise ValueError(f"padding_candidate must be 'first' or 'last', got {padding_candidate!r}")
        if padding_size == 0:
            return
        assert len(self) > 0, "an empty DataProto has no row to pad with"
        row = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder(torch.tensor([*range(len(self)), *[row] * padding_size]))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Equal consecutive parts; AssertionError if not divisible, unless auto padding is on.

        With auto padding the sizes follow `torch.chunk`, which may return fewer parts.
        """
        rows = len(self)
        assert chunks > 0, f"chunks must be positive, got {chunks}"
        assert rows % chunks == 0 or self.is_padding_enabled(), (
            f"a batch of {rows} rows cannot be split equally over {chunks} ranks; use a multiple of {chunks} rows "
            f"(next: {math.ceil(rows / chunks) * chunks}) or pad_dataproto_to_divisor"
        )
        size = math.ceil(rows / chunks)
        if size == 0:
            return [self.slice(0, 0) for _ in range(chunks)]
        return [self.slice(start, min(start + size, rows)) for start in range(0, rows, size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Join rows in the given order; columns must be the same; `meta_info` is the first one's."""
        assert len(data) > 0, "concat needs at least one DataProto"
        first = data[0]
        columns = [_columns(d.batch) | {f"non_tensor:{k}" for k in d.non_tensor_batch} for d in data]
        for i, own in enumerate(columns):
            assert own == columns[0], f"concat: part {i} differs from part 0 in the columns {sorted(own ^ columns[0])}"
        parts: list[Any] = [d.batch for d in data]
        batch: Any = None if first.batch is None else torch.cat(parts, dim=0)
        arrays = {k: np.concatenate([d.non_tensor_batch[k] for d in data], axis=0) for k in first.non_tensor_batch}
        return first._like(batch, arrays)

    # ---- storage ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> tuple[bytes | None, dict[str, np.ndarray], dict[str, Any]]:
        if self.batch is None:
            return None, self.non_tensor_batch, self.meta_info
        buffer = io.BytesIO()
        # The clone cuts views loose: torch.save would otherwise write the whole storage behind each slice.
        torch.save({"size": list(self.batch.batch_size), "data": self.batch.clone().to_dict()}, buffer)
        return buffer.getvalue(), self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple[bytes | None, dict[str, np.ndarray], dict[str, Any]]) -> None:
        raw, self.non_tensor_batch, self.meta_info = state
        self.batch = None
        if raw is not None:
            device = None if torch.cuda.is_available() else "cpu"
            stored = torch.load(io.BytesIO(raw), map_location=device, weights_only=True)
            self.batch = TensorDict(stored["data"], batch_size=stored["size"])

    def save_to_disk(self, filepath: str | Path) -> None:
        """Pickle this record to a file (written beside it first, then renamed)."""
        temporary = Path(f"{filepath}.tmp-{os.getpid()}")
        try:
            with temporary.open("wb") as f:
                pickle.dump(self, f)
            os.replace(temporary, filepath)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read what `save_to_disk` wrote. Unpickles: only for files you trust."""
        with open(filepath, "rb") as f:
            data = pickle.load(f)
        if not isinstance(data, DataProto):
            raise ValueError(f"{filepath} holds a {type(data).__name__}, not a DataProto")
        return data

    def print_size(self, prefix: str = "") -> None:
        """Log the memory held by tensors and arrays, in MiB."""
        tensors = 0 if self.batch is None else self.batch.bytes()
        arrays = sum(v.nbytes for v in self.non_tensor_batch.values())
        logger.info("%stensors %.2f MiB, arrays %.2f MiB", prefix and f"{prefix} ", tensors / 2**20, arrays / 2**20)


def _columns(batch: TensorDict | None) -> set[Any]:
    return set() if batch is None else set(batch.keys())


def _has_columns(data: DataProto) -> bool:
    return data.batch is not None or bool(data.non_tensor_batch)


def _identity(rows: Any) -> Any:
    return rows


class _Rows(torch.utils.data.Dataset[DataProto]):
    """A DataProto as a map-style dataset that fetches a whole mini-batch at once."""

    def __init__(self, data: DataProto) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> DataProto:
        return self._data.select_idxs([index])

    def __getitems__(self, indices: list[int]) -> DataProto:
        return self._data.select_idxs(indices)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack single rows into a record; `meta_info` of the first."""
    assert len(x) > 0, "collate_fn needs at least one row"
    first = x[0]
    rows: list[Any] = [item.batch for item in x]
    batch: Any = None if first.batch is None else torch.stack(rows).contiguous()
    columns = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    return DataProto(batch, {k: _object_array(v) for k, v in columns.items()}, first.meta_info)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Rows taken from the start (cycling) are appended until the length divides; returns (padded, number added)."""
    assert isinstance(data, DataProto), f"data must be a DataProto, got {type(data).__name__}"
    pad = -len(data) % size_divisor
    if pad == 0:
        return data, 0
    rows = torch.arange(len(data) + pad) % len(data)
    return data.select_idxs(rows), pad


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """`(B, ...)` -> `(new_batch_size, B / new_batch_size, ...)` for every column."""
    rows = len(data)
    assert rows % new_batch_size == 0, f"{rows} rows cannot be folded into {new_batch_size} equal parts"
    batch = data.batch
    if batch is not None:
        columns = {k: v.reshape(new_batch_size, rows // new_batch_size, *v.shape[1:]) for k, v in batch.items()}
        batch = TensorDict(columns, batch_size=[new_batch_size])
    arrays = {k: v.reshape(new_batch_size, -1, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return data._like(batch, arrays)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Merge the first `batch_dims` dimensions of every column into one; the inverse of `fold_batch_dim`."""
    batch = data.batch
    if batch is not None:
        columns = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in batch.items()}
        rows = next(iter(columns.values())).shape[0] if columns else 0
        batch = TensorDict(columns, batch_size=[rows])
    arrays = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return data._like(batch, arrays)


class DataProtoFuture:
    """Result of a worker group that has not been fetched: `get` waits, collects and selects.

    Args:
        collect_fn: joins the ranks' results into one DataProto.
        futures: one Ray object reference a rank.
        dispatch_fn: applied to the joined result (how `chunk` selects one part on arrival).
    """

    def __init__(
        self,
        collect_fn: Callable[[list[Any]], DataProto],
        futures: Sequence[Any],
        dispatch_fn: Callable[[DataProto], DataProto] | None = None,
    ) -> None:
        self.collect_fn, self.futures, self.dispatch_fn = collect_fn, list(futures), dispatch_fn

    @staticmethod
    def concat(data: Sequence[Any]) -> DataProtoFuture:
        """A future of the concatenation of Ray object references."""
        return DataProtoFuture(DataProto.concat, data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of the equal parts; nothing is fetched before `get`."""
        before = self.dispatch_fn or _identity

        def part(index: int) -> DataProtoFuture:
            return DataProtoFuture(self.collect_fn, self.futures, lambda data: before(data).chunk(chunks)[index])

        return [part(index) for index in range(chunks)]

    def get(self) -> DataProto:
        """Wait for all ranks and return the joined (and selected) record."""
        import ray

        data = self.collect_fn(ray.get(self.futures))
        assert isinstance(data, DataProto), f"collect_fn returned a {type(data).__name__}, not a DataProto"
        return data if self.dispatch_fn is None else self.dispatch_fn(data)


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace `data`'s rows by those of all ranks of a torch.distributed group, in rank order (in place).

    Numbers of rows may differ between ranks; columns must be the same. Tensors return on the device they came from.
    """
    import torch.distributed as dist

    device = None if data.batch is None else next((v.device for v in data.batch.values()), None)
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    cpu = data.select().to("cpu") if data.batch is not None else data
    dist.all_gather_object(parts, cpu, group=process_group)
    joined = DataProto.concat(parts)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch
    if device is not None:
        data.to(device)
