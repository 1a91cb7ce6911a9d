# SPDX-License-Identifier: Apache-2.0
"""Worker groups of one rank inside the driver's own process: the same methods as on Ray, without Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerGroup
from verl.single_controller.base.worker import free_port

__all__ = ["LocalWorkerGroup", "create_local_colocated"]


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _isolated(value: Any) -> Any:
    """A record whose columns and meta information can be added to without the other side noticing, as on Ray.

    Tensors themselves are shared: a worker must not write into the tensors it is given.
    """
    if not isinstance(value, DataProto):
        return value
    batch = None if value.batch is None else value.batch.copy()
    return DataProto(batch, dict(value.non_tensor_batch), dict(value.meta_info))


class LocalWorkerGroup(WorkerGroup):
    """One worker in this process; every call runs at once, and exceptions arrive as they are.

    The rank variables (`RANK=0, WORLD_SIZE=1, ...`) are set only while the worker runs. Methods registered with
    `blocking=False` have finished when they return: `DataProto` results come as a resolved `DataProtoFuture`, others
    as plain values.
    """

    def __init__(self, cls_with_args: ClassWithInitArgs, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"LocalWorkerGroup takes a ClassWithInitArgs only, not {sorted(kwargs)}")
        self._world_size = 1
        self._env = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
        }
        with _environment(self._env):
            self.worker: Any = cls_with_args()
        self._bind_worker_methods(cls_with_args.cls)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker; returns its result."""
        with _environment(self._env):
            method = getattr(self.worker, method_name)
            result = method(*(_isolated(a) for a in args), **{k: _isolated(v) for k, v in kwargs.items()})
        return _isolated(result)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the worker; returns a list with its result."""
        rank_args, rank_kwargs = self._rank_arguments(args, kwargs)[0]
        return [self.execute_rank_zero_async(method_name, *rank_args, **rank_kwargs)]

    def _wait(self, outputs: list[Any], method_name: str) -> list[Any]:
        return outputs

    def _deferred(self, result: Any) -> Any:
        return DataProtoFuture(lambda _: result, []) if isinstance(result, DataProto) else result

    def shutdown(self) -> None:
        """Drop the worker."""
        self.worker = None


def create_local_colocated(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, LocalWorkerGroup]:
    """One local group per role; roles can reach each other through `Worker.get_fused_worker_by_name`."""
    groups = {role: LocalWorkerGroup(cls_with_args) for role, cls_with_args in class_dict.items()}
    workers = {role: group.worker for role, group in groups.items()}
    for worker in workers.values():
        if isinstance(worker, Worker):
            worker.fused_worker_dict = workers
    return groups
