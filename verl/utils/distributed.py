# SPDX-License-Identifier: Apache-2.0
"""The process group every worker joins, and the two collectives the workers need."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = [
    "all_reduce_max",
    "all_reduce_sums",
    "initialize_global_process_group",
    "initialize_process_group",
    "own_process_group",
]


def initialize_process_group(device: torch.device, timeout_seconds: int = 600) -> tuple[int, int]:
    """Join the default process group unless this process already has; returns ``(rank, world size)``.

    Rank, size and rendezvous come from ``RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``. A process without
    ``WORLD_SIZE``, or alone, forms a group of one through an in-memory store, so it needs no port.
    CPU tensors go through gloo on every device: offloaded parameters and counters live on the CPU.
    """
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_seconds)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


@contextmanager
def own_process_group() -> Iterator[None]:
    """Leaves the default process group after the block, unless this process was in one before."""
    joined_before = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not joined_before:
            dist.destroy_process_group()


def initialize_global_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
    """Public name of the reference: joins the group on the default device; ``(local rank, rank, world size)``."""
    from verl.utils.device import resolve_device

    rank, world_size = initialize_process_group(resolve_device("auto"), timeout_second)
    return int(os.environ.get("LOCAL_RANK", "0")), rank, world_size


def all_reduce_sums(values: Mapping[str, float | torch.Tensor], device: torch.device) -> dict[str, float]:
    """Sum of each named number over all ranks, in one float64 collective."""
    names = sorted(values)
    packed = torch.tensor([float(values[name]) for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return dict(zip(names, packed.tolist()))


def all_reduce_max(value: int, device: torch.device) -> int:
    """Largest of the ranks' integers."""
    packed = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return int(packed.item())
