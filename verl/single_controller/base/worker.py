# SPDX-License-Identifier: Apache-2.0
"""Base class of workers: one rank of a group, in a process of its own (or in the driver, for local groups)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, Execute, register

__all__ = ["Worker", "free_port"]


def free_port(host: str = "") -> int:
    """A TCP port that is free on this machine at the moment of the call."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


class Worker:
    """Knows its place in the group from the environment: `RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE`,
    `MASTER_ADDR, MASTER_PORT`. They are in place before `__init__` runs, so a subclass may join
    torch.distributed there or in any later method."""

    fused_worker_dict: dict[str, Any]
    """The other roles of this process by name; empty unless co-located."""

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        env = os.environ
        if cuda_visible_devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        self._rank, self._world_size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        self._local_rank = int(env.get("LOCAL_RANK", "0"))
        self._local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
        self._master_addr, self._master_port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
        self.fused_worker_dict = {}

    @property
    def rank(self) -> int:
        """Rank of this worker, 0 to `world_size - 1`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._world_size

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port where rank 0 of torch.distributed listens."""
        return self._master_addr, self._master_port

    def get_cuda_visible_devices(self) -> str:
        """`CUDA_VISIBLE_DEVICES` of this process, or "not set"."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """Another role in the same process, or None."""
        return self.fused_worker_dict.get(worker_name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., DataProto], *args: Any, **kwargs: Any) -> DataProto:
        """Run `func(worker, *parts)` on every rank, each with its part of the data."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(*args)` in rank 0's process and return what it returns."""
        return func(*args, **kwargs)
