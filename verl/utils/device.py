# SPDX-License-Identifier: Apache-2.0
"""Which device a process computes on: CUDA or the CPU, nothing else."""

from __future__ import annotations

import os
from types import ModuleType

import torch

from verl.utils.errors import UserError

__all__ = [
    "get_device_id",
    "get_device_name",
    "get_nccl_backend",
    "get_torch_device",
    "is_cuda_available",
    "resolve_device",
]

is_cuda_available: bool = torch.cuda.is_available()


def get_device_name() -> str:
    """``"cuda"`` when a CUDA device is visible, else ``"cpu"``."""
    return "cuda" if is_cuda_available else "cpu"


def get_torch_device() -> ModuleType:
    """The torch namespace of the default device: ``torch.cuda`` or ``torch.cpu``."""
    return torch.cuda if is_cuda_available else torch.cpu


def get_device_id() -> int:
    """Index of the current device inside this process; 0 on the CPU."""
    return torch.cuda.current_device() if is_cuda_available else 0


def get_nccl_backend() -> str:
    """Collective backend for CUDA tensors."""
    return "nccl"


def resolve_device(kind: str) -> torch.device:
    """Device of this process for ``trainer.device`` = ``cpu``, ``cuda`` or ``auto``.

    On CUDA the process takes the device of its ``LOCAL_RANK``, or the only one it can see (a Ray actor).

    Raises:
        UserError: ``cuda`` is asked for and none is visible, or ``kind`` is something else.
    """
    if kind == "auto":
        kind = get_device_name()
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise UserError(f"trainer.device={kind}: use cuda, cpu or auto")
    if not is_cuda_available:
        raise UserError("trainer.device=cuda, but no CUDA device is visible to this process; set trainer.device=cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
