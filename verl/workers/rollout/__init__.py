# SPDX-License-Identifier: Apache-2.0
"""Generation engines behind one interface, and the session that keeps their weights current.

Names are loaded on first use: the session and the interface need no model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["BaseRollout", "HFRollout", "VLLMRollout", "load_engine", "rollout_session"]

_HOMES = {
    "BaseRollout": "base",
    "HFRollout": "hf_rollout",
    "VLLMRollout": "vllm_rollout",
    "load_engine": "engines",
    "rollout_session": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
