# SPDX-License-Identifier: Apache-2.0
"""A group of workers that is called like one object, and the pool of processes it lives in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    PADDING_KEY,
    Execute,
    drop_padding,
    get_predefined_dispatch_fn,
)

__all__ = ["ClassWithInitArgs", "PendingCall", "ResourcePool", "WorkerGroup"]


class PendingCall:
    """A call that the workers have been given.

    Args:
        outputs: one a rank that runs it; what they are is the group's business.
        wait: turns them into the ranks' results.
        collect: joins those.
    """

    def __init__(
        self, outputs: list[Any], wait: Callable[[list[Any]], list[Any]], collect: Callable[[list[Any]], Any]
    ) -> None:
        self.outputs, self._wait, self.collect = outputs, wait, collect

    def result(self) -> Any:
        """Wait for it: the result, and the exceptions, of a call that waits at once."""
        return self.collect(self._wait(self.outputs))


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

    def submit(self, method_name: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Give the ranks a registered method to run and do not wait. A rank runs its calls in the order they came.

        Raises:
            AttributeError: the worker class registers no method of that name.
        """
        if method_name not in self._submitters:
            raise AttributeError(f"{method_name!r} is no registered method of this worker group")
        return self._submitters[method_name](*args, **kwargs)

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
        self._submitters: dict[str, Callable[..., PendingCall]] = {}
        for name in dir(worker_cls):
            method = getattr(worker_cls, name)
            if callable(method) and hasattr(method, MAGIC_ATTR):
                self._submitters[name] = self._submitter(method, name)
                setattr(self, name, self._bound(method, self._submitters[name]))

    def _bound(self, method: Callable[..., Any], submit: Callable[..., PendingCall]) -> Callable[..., Any]:
        blocking = getattr(method, MAGIC_ATTR)["blocking"]

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            pending = submit(*args, **kwargs)
            return pending.result() if blocking else self._deferred(pending.collect(pending.outputs))

        return call

    def _submitter(self, method: Callable[..., Any], name: str) -> Callable[..., PendingCall]:
        marks = getattr(method, MAGIC_ATTR)
        mode = marks["dispatch_mode"]
        functions = mode if isinstance(mode, dict) else get_predefined_dispatch_fn(mode)

        def wait(outputs: list[Any]) -> list[Any]:
            return self._wait(outputs, name)

        def submit(*args: Any, **kwargs: Any) -> PendingCall:
            if marks["execute_mode"] is Execute.RANK_ZERO:
                return PendingCall([self.execute_rank_zero_async(name, *args, **kwargs)], wait, itemgetter(0))
            args, kwargs = functions["dispatch_fn"](self, *args, **kwargs)
            padding = kwargs.pop(PADDING_KEY, None)

            def collect(outputs: list[Any]) -> Any:
                result = functions["collect_fn"](self, outputs)
                return result if padding is None else drop_padding(result, padding)

            return PendingCall(self.execute_all_async(name, *args, **kwargs), wait, collect)

        return submit
