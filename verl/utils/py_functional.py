# SPDX-License-Identifier: Apache-2.0
"""Helpers for dictionaries, configs and calls that may hang."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

__all__ = ["append_to_dict", "convert_to_regular_types", "timeout_limit", "union_two_dict"]

P = ParamSpec("P")
T = TypeVar("T")


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Append every value of `new_data` to the list of its key in `data`, in place; new keys start a list."""
    for key, value in new_data.items():
        data.setdefault(key, []).append(value)


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add the entries of `dict2` to `dict1`, in place, and return it; equal keys must hold equal values.

    Raises:
        AssertionError: a key is in both with different values.
    """
    for key, value in dict2.items():
        assert key not in dict1 or dict1[key] == value, f"{key!r} is in both dictionaries with different values"
        dict1[key] = value
    return dict1


def convert_to_regular_types(obj: Any) -> Any:
    """`obj` with OmegaConf nodes, at any depth of lists and dictionaries, as plain lists and dictionaries."""
    if isinstance(obj, (DictConfig, ListConfig)):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, (list, tuple)):
        return type(obj)(convert_to_regular_types(item) for item in obj)
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return obj


def timeout_limit(seconds: float) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: a call that takes longer than `seconds` is interrupted by a TimeoutError.

    It uses the process's alarm signal, so it works in the main thread of a Unix process only and does not nest.

    Raises:
        ValueError: `seconds` is not positive, or (when called) the thread is not the main one.
    """
    if seconds <= 0:
        raise ValueError(f"a time limit must be positive, got {seconds}")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            if threading.current_thread() is not threading.main_thread():
                raise ValueError(f"{function.__qualname__} has a time limit, which works in the main thread only")

            def stop(signum: int, frame: FrameType | None) -> None:
                raise TimeoutError(f"{function.__qualname__} took longer than {seconds:g} s")

            before = signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return function(*args, **kwargs)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

        return limited

    return decorate
