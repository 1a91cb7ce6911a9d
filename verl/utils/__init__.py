# SPDX-License-Identifier: Apache-2.0
"""Helpers of the training stack that know nothing of algorithms or environments.

The two names below are loaded on first use, so that importing a helper needs no model library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from verl.utils import tokenizer

        return getattr(tokenizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
