# SPDX-License-Identifier: Apache-2.0
"""What a value model offers to its worker."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from verl.protocol import DataProto

__all__ = ["BasePPOCritic"]


class BasePPOCritic(ABC):
    """Values of given responses, and updates towards returns."""

    @abstractmethod
    def compute_values(self, data: DataProto) -> Tensor:
        """``(B, R)`` float32 on the CPU, 0 outside the response mask."""

    @abstractmethod
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Optimizer steps over all mini-batches of ``data``; metrics already reduced over ranks."""
