# SPDX-License-Identifier: Apache-2.0
"""Reduction of metrics, under the name that recipes import it by."""

from __future__ import annotations

from verl.trainer.ppo.metric_utils import reduce_metrics

__all__ = ["reduce_metrics"]
