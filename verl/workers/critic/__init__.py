# SPDX-License-Identifier: Apache-2.0
"""Value model: values and updates."""

from __future__ import annotations

from verl.workers.critic.base import BasePPOCritic
from verl.workers.critic.dp_critic import DataParallelPPOCritic

__all__ = ["BasePPOCritic", "DataParallelPPOCritic"]
