# SPDX-License-Identifier: Apache-2.0
"""Logging of device memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

__all__ = ["GPUMemoryLogger", "log_gpu_memory_usage"]

P = ParamSpec("P")
T = TypeVar("T")
_GIB = 1024.0**3
_logger = logging.getLogger(__name__)


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Log allocated, reserved and used memory of the current CUDA device in GiB; nothing without one.

    Args:
        head: start of the line.
        rank: only this rank logs; None = every rank.
    """
    here = dist.get_rank() if dist.is_initialized() else 0
    if not torch.cuda.is_available() or rank not in (None, here):
        return
    free, total = torch.cuda.mem_get_info()
    (logger or _logger).log(
        level,
        "%s: %.2f GiB allocated, %.2f reserved, %.2f of %.2f used",
        head,
        torch.cuda.memory_allocated() / _GIB,
        torch.cuda.memory_reserved() / _GIB,
        (total - free) / _GIB,
        total / _GIB,
    )


class GPUMemoryLogger:
    """Decorator that logs device memory before and after a call.

    Args:
        role: start of the lines.
        log_only_rank_0: whether the other ranks stay silent.
    """

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role = role
        self.logger = logger
        self.level = level
        self.rank = 0 if log_only_rank_0 else None

    def __call__(self, decorated_function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(decorated_function)
        def logged(*args: P.args, **kwargs: P.kwargs) -> T:
            name = f"{self.role} {decorated_function.__name__}"
            log_gpu_memory_usage(f"before {name}", self.logger, self.level, self.rank)
            result = decorated_function(*args, **kwargs)
            log_gpu_memory_usage(f"after {name}", self.logger, self.level, self.rank)
            return result

        return logged
