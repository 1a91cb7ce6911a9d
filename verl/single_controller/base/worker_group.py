# SPDX-License-Identifier: Apache-2.0
"""A group of workers that is called like one object, and the pool of processes it lives in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    PADDING_KEY,
    Execute,
    drop_padding,
    get_predefined_dispatch_fn,
)

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]


class ClassWithInitArgs:
    """A class and the arguments to build it with; calling it builds the object in this process."""

    def __init__(self, cls: type[Any], *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> Any:
        """Build the object here and now."""
        return self.cls(*self.args, **self.kwargs)


class ResourcePool:
    """How many processes each node holds, e.g. `[8, 8]` for two nodes of eight."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 1,
        n_gpus_per_node: int = 8,
    ) -> None:
        self._store = list(process_on_nodes or ())
        if any(n < 1 for n in self._store):
            raise ValueError(f"every node needs at least one process, got {self._store}")
        self.max_colocate_count, self.n_gpus_per_node = max_colocate_count, n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Append a node with that many processes."""
        self._store.append(process_count)

    @property
    def store(self) -> list[int]:
        """The processes per node."""
        return self._store

    @property
    def world_size(self) -> int:
        """Number of processes in all."""
        return sum(self._store)


class WorkerGroup:
    """Base of the groups. Every method that the worker class marks with `@register` becomes a method of the group.

    Subclasses say how calls reach the workers (`execute_all_async`, `execute_rank_zero_async`) and how results are
    waited for (`_wait`).
    """

    _world_size: int = 0

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Registered methods are bound at run time."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every rank without waiting.

        When all arguments are lists with one entry a rank, each rank gets its entry; otherwise all get the same.
        """
        raise NotImplementedError

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on rank 0 without waiting."""
        raise NotImplementedError

    def _wait(self, outputs: list[Any], method_name: str) -> list[Any]:
        raise NotImplementedError

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `execute_all_async`, waiting for the results (list in rank order)."""
        return self._wait(self.execute_all_async(method_name, *args, **kwargs), method_name)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on rank 0 and return its result."""
        return self._wait([self.execute_rank_zero_async(method_name, *args, **kwargs)], method_name)[0]

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Same as `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def _deferred(self, result: Any) -> Any:
        """What a method registered with `blocking=False` returns."""
        return result

    def _rank_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
        n = self.world_size
        if all(isinstance(v, list) and len(v) == n for v in (*args, *kwargs.values())):
            return [([a[i] for a in args], {k: v[i] for k, v in kwargs.items()}) for i in range(n)]
        return [(list(args), kwargs)] * n

    def _bind_worker_methods(self, worker_cls: type[Any]) -> None:
        """Give this group the registered methods of a worker class."""
        for name in dir(worker_cls):
            method = getattr(worker_cls, name)
            if callable(method) and hasattr(method, MAGIC_ATTR):
                setattr(self, name, self._bound(method, name))

    def _bound(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        marks = getattr(method, MAGIC_ATTR)
        mode, blocking = marks["dispatch_mode"], marks["blocking"]
        functions = mode if isinstance(mode, dict) else get_predefined_dispatch_fn(mode)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if marks["execute_mode"] is Execute.RANK_ZERO:
                run = self.execute_rank_zero_sync if blocking else self.execute_rank_zero_async
                return run(name, *args, **kwargs)
            args, kwargs = functions["dispatch_fn"](self, *args, **kwargs)
            padding = kwargs.pop(PADDING_KEY, None)
            outputs = self.execute_all_async(name, *args, **kwargs)
            result = functions["collect_fn"](self, self._wait(outputs, name) if blocking else outputs)
            result = result if padding is None else drop_padding(result, padding)
            return result if blocking else self._deferred(result)

        return call
