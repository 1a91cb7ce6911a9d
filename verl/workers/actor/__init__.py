# SPDX-License-Identifier: Apache-2.0
"""Policy: log-probabilities and updates."""

from __future__ import annotations

from verl.workers.actor.base import BasePPOActor
from verl.workers.actor.dp_actor import DataParallelPPOActor

__all__ = ["BasePPOActor", "DataParallelPPOActor"]
