# SPDX-License-Identifier: Apache-2.0
"""Spellings of floating-point types."""

from __future__ import annotations

import torch

from verl.utils.errors import UserError

__all__ = ["PrecisionType"]

_SPELLINGS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: ("fp32", "float32", "float", "32"),
    torch.float16: ("fp16", "float16", "half", "16"),
    torch.bfloat16: ("bf16", "bfloat16"),
}


class PrecisionType:
    """From a config's spelling of a type to torch's and back; spellings may also be the torch type itself."""

    @staticmethod
    def to_dtype(precision: str | int | torch.dtype, config_key: str = "dtype") -> torch.dtype:
        """Torch type for a spelling such as fp32, bf16, float16.

        Raises:
            UserError: unknown spelling; names `config_key`.
        """
        for dtype, spellings in _SPELLINGS.items():
            if precision == dtype or str(precision) in spellings:
                return dtype
        known = ", ".join(PrecisionType.supported_types())
        raise UserError(f"{config_key}={precision}: unknown dtype; use one of {known}")

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        """`fp32`, `fp16` or `bf16`. Raises UserError for other types."""
        return _SPELLINGS[PrecisionType.to_dtype(precision)][0]

    @staticmethod
    def supported_types() -> list[str]:
        """All spellings."""
        return [spelling for spellings in _SPELLINGS.values() for spelling in spellings]

    @staticmethod
    def supported_type(precision: str | int | torch.dtype) -> bool:
        """Whether `to_dtype` knows the spelling."""
        return precision in _SPELLINGS or str(precision) in PrecisionType.supported_types()

    @staticmethod
    def is_fp16(precision: str | int | torch.dtype) -> bool:
        """Whether it spells half precision."""
        return PrecisionType.supported_type(precision) and PrecisionType.to_dtype(precision) == torch.float16

    @staticmethod
    def is_fp32(precision: str | int | torch.dtype) -> bool:
        """Whether it spells single precision."""
        return PrecisionType.supported_type(precision) and PrecisionType.to_dtype(precision) == torch.float32

    @staticmethod
    def is_bf16(precision: str | int | torch.dtype) -> bool:
        """Whether it spells bfloat16."""
        return PrecisionType.supported_type(precision) and PrecisionType.to_dtype(precision) == torch.bfloat16
