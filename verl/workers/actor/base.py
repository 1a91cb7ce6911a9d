# SPDX-License-Identifier: Apache-2.0
"""What a policy offers to its worker."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from verl.protocol import DataProto

__all__ = ["BasePPOActor"]


class BasePPOActor(ABC):
    """Log-probabilities of given responses, and policy updates."""

    @abstractmethod
    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """``(log_probs, entropys or None)``, each ``(B, R)`` float32 on the CPU, 0 outside the response mask."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict[str, float]:
        """Optimizer steps over all mini-batches of ``data``; metrics already reduced over ranks."""
