# SPDX-License-Identifier: Apache-2.0
"""HGPO (arXiv 2602.22817): advantages of steps compared in groups of shared history, of every length.

Importing this package registers the estimator ``hgpo`` and loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.trainer.ppo.registry import AdvantageResult, register_adv_est

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.config.schema import AlgorithmConfig

__all__ = ["hgpo"]


@register_adv_est("hgpo", needs_step_returns=True)
def hgpo(batch: DataProto, config: AlgorithmConfig) -> AdvantageResult:
    """``algorithm.hgpo`` applied to a rollout's rows; see :mod:`recipe.hgpo.core_hgpo`."""
    from recipe.hgpo.core_hgpo import hgpo_of_batch

    return hgpo_of_batch(batch, config)
