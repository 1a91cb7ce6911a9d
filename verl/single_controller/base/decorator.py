# SPDX-License-Identifier: Apache-2.0
"""`@register` marks the methods a worker group offers; a dispatch mode says how arguments and results travel.

A mode is a pair of functions. `dispatch_fn(worker_group, *args, **kwargs)` returns `(args, kwargs)` in which every
value is a list with one entry a rank; `collect_fn(worker_group, outputs)` turns the list of the ranks' results into
what the caller gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from verl.protocol import DataProto, DataProtoFuture

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "MAGIC_ATTR",
    "Dispatch",
    "Execute",
    "collect_all_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

MAGIC_ATTR = "__verl_registered__"
"""Attribute of a registered method: dict with `dispatch_mode`, `execute_mode` and `blocking`."""

PADDING_KEY = "__verl_padding__"
"""Keyword by which a dispatch function reports `(rows, added rows)`; it never reaches the workers."""

F = TypeVar("F", bound=Callable[..., Any])
DispatchFn: TypeAlias = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
CollectFn: TypeAlias = Callable[["WorkerGroup", list[Any]], Any]


@dataclass(frozen=True)
class Dispatch:
    """Name of a dispatch mode; `register_dispatch_mode` adds members."""

    name: str

    RANK_ZERO: ClassVar[Dispatch]
    """Only rank 0 is called; its result is returned as it is."""
    ONE_TO_ALL: ClassVar[Dispatch]
    """Every rank gets the same arguments; list of results."""
    ALL_TO_ALL: ClassVar[Dispatch]
    """The caller passes lists with one entry a rank (anything else goes to every rank); list of results."""
    DP_COMPUTE: ClassVar[Dispatch]
    """Every argument must be a sequence with one entry a rank; list of results."""
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    """DataProto arguments are split over the ranks, the results concatenated (`meta_info` is rank 0's)."""
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    """As DP_COMPUTE_PROTO, with a function as first argument that every rank gets."""
    DP_COMPUTE_METRIC: ClassVar[Dispatch]
    """DataProto arguments are split over the ranks; list of results."""
    DIRECT_ROLLOUT_METHOD: ClassVar[Dispatch]
    """Called on the worker itself, never through the group."""


for _name in Dispatch.__annotations__:
    if _name != "name":
        setattr(Dispatch, _name, Dispatch(_name))


class Execute(Enum):
    """Which ranks run a registered method."""

    ALL = "execute_all"
    RANK_ZERO = "execute_rank_zero"


def _split_data_proto(
    chunks: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every DataProto becomes a list of `chunks` parts; with auto padding the last row fills up and is reported."""
    values = [*args, *kwargs.values()]
    for value in values:
        if not isinstance(value, DataProto | DataProtoFuture):
            raise TypeError(f"this method takes DataProto arguments only, got {type(value).__name__}")
    protos = [v for v in values if isinstance(v, DataProto)]
    extra: dict[str, Any] = {}
    if len(protos) == len(values) and any(p.is_padding_enabled() and len(p) % chunks for p in protos):
        rows = {len(p) for p in protos}
        assert len(rows) == 1, f"auto padding needs arguments with the same number of rows, got {sorted(rows)}"
        size = rows.pop()
        extra[PADDING_KEY] = (size, -size % chunks)

    def split(value: DataProto | DataProtoFuture) -> list[Any]:
        if extra and isinstance(value, DataProto):
            value = value.select()  # padding works in place; the caller's record stays as it is
            value.padding(extra[PADDING_KEY][1])
        return list(value.chunk(chunks))

    return tuple(split(a) for a in args), {k: split(v) for k, v in kwargs.items()} | extra


def drop_padding(output: Any, padding: tuple[int, int]) -> Any:
    """Take the rows off again that auto padding added; results without one row per input row stay as they are."""
    rows, added = padding
    if isinstance(output, DataProto):
        return output.slice(0, rows) if len(output) == rows + added else output
    if isinstance(output, DataProtoFuture):
        return DataProtoFuture(output.collect_fn, output.futures, lambda data: drop_padding(data, padding))
    return output


def dispatch_one_to_all(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments for every rank."""
    n = worker_group.world_size
    return tuple([a] * n for a in args), {k: [v] * n for k, v in kwargs.items()}


def dispatch_all_to_all(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments are passed on as they came."""
    return args, kwargs


def dispatch_dp_compute(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One entry a rank; AssertionError for another length."""
    for value in (*args, *kwargs.values()):
        assert isinstance(value, list | tuple) and len(value) == worker_group.world_size, (
            f"every argument must be a list with one entry for each of the {worker_group.world_size} ranks"
        )
    return tuple(list(a) for a in args), {k: list(v) for k, v in kwargs.items()}


def dispatch_dp_compute_data_proto(
    worker_group: WorkerGroup, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """DataProto arguments split over the ranks."""
    return _split_data_proto(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(
    worker_group: WorkerGroup, func: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The function for every rank, then DataProto arguments split over the ranks."""
    if not callable(func):
        raise TypeError(f"the first argument must be a function, got {type(func).__name__}")
    split, split_kwargs = _split_data_proto(worker_group.world_size, args, kwargs)
    return ([func] * worker_group.world_size, *split), split_kwargs


def dispatch_direct_rollout_call(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
    """Such a method belongs to the worker's own process."""
    raise NotImplementedError(
        "a method registered with DIRECT_ROLLOUT_METHOD is called on its worker, not on the group"
    )


def collect_all_to_all(worker_group: WorkerGroup, output: list[Any]) -> list[Any]:
    """List of the ranks' results."""
    assert len(output) == worker_group.world_size, f"{len(output)} results from {worker_group.world_size} ranks"
    return output


def collect_dp_compute_data_proto(worker_group: WorkerGroup, output: list[Any]) -> DataProto | DataProtoFuture:
    """Concatenate the ranks' results; `meta_info` (so also `metrics`, already reduced by the workers) is rank 0's."""
    collect_all_to_all(worker_group, output)
    if all(isinstance(o, DataProto) for o in output):
        return DataProto.concat(output)
    kinds = sorted({type(o).__name__ for o in output})
    if kinds != ["ObjectRef"]:
        raise TypeError(f"a DP_COMPUTE_PROTO method must return a DataProto on every rank, got {', '.join(kinds)}")
    return DataProtoFuture.concat(output)


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, dict[str, Callable[..., Any]]] = {
    mode: {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    for mode, dispatch_fn, collect_fn in (
        (Dispatch.RANK_ZERO, dispatch_all_to_all, collect_all_to_all),
        (Dispatch.ONE_TO_ALL, dispatch_one_to_all, collect_all_to_all),
        (Dispatch.ALL_TO_ALL, dispatch_all_to_all, collect_all_to_all),
        (Dispatch.DP_COMPUTE, dispatch_dp_compute, collect_all_to_all),
        (Dispatch.DP_COMPUTE_PROTO, dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
        (
            Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
            dispatch_dp_compute_data_proto_with_func,
            collect_dp_compute_data_proto,
        ),
        (Dispatch.DP_COMPUTE_METRIC, dispatch_dp_compute_data_proto, collect_all_to_all),
        (Dispatch.DIRECT_ROLLOUT_METHOD, dispatch_direct_rollout_call, dispatch_direct_rollout_call),
    )
}


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Add the mode `Dispatch.<dispatch_mode_name>`; ValueError when the name is taken."""
    if hasattr(Dispatch, dispatch_mode_name):
        raise ValueError(f"dispatch mode {dispatch_mode_name!r} exists already; use update_dispatch_mode to change it")
    mode = Dispatch(dispatch_mode_name)
    setattr(Dispatch, dispatch_mode_name, mode)
    update_dispatch_mode(mode, dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Set a mode's functions; groups that exist already keep the old ones."""
    _check_dispatch_mode(dispatch_mode)
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable[..., Any]]:
    """`{"dispatch_fn": ..., "collect_fn": ...}` of a mode."""
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """`{"execute_fn_name": ...}`: the group's method that runs this mode."""
    return {"execute_fn_name": execute_mode.value}


def _check_dispatch_mode(dispatch_mode: Dispatch | Mapping[str, Any]) -> None:
    assert isinstance(dispatch_mode, Dispatch | Mapping), f"not a dispatch mode: {dispatch_mode!r}"
    if isinstance(dispatch_mode, Mapping):
        missing = {"dispatch_fn", "collect_fn"} - dispatch_mode.keys()
        assert not missing, f"a dispatch mode given as a dict needs {sorted(missing)}"


def _check_execute_mode(execute_mode: Execute) -> None:
    assert isinstance(execute_mode, Execute), f"not an execute mode: {execute_mode!r}"


def _materialize(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Offer a worker's method on its group.

    Args:
        dispatch_mode: a member of `Dispatch`, or a dict with `dispatch_fn` and `collect_fn`.
        execute_mode: with `RANK_ZERO` the arguments go to rank 0 as they are and its result comes back as it is.
        blocking: False returns without waiting: object references, or a `DataProtoFuture` for DP_COMPUTE_PROTO.
        materialize_futures: resolve `DataProtoFuture` arguments on the worker before the method runs.
    """
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)
    if dispatch_mode == Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO

    def decorator(func: F) -> F:
        @functools.wraps(func)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if materialize_futures:
                args, kwargs = tuple(_materialize(a) for a in args), {k: _materialize(v) for k, v in kwargs.items()}
            return func(*args, **kwargs)

        marks = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}
        setattr(inner, MAGIC_ATTR, marks)
        return inner  # type: ignore[return-value]

    return decorator
