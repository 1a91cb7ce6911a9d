# SPDX-License-Identifier: Apache-2.0
"""GiGPO (arXiv 2505.10978): episode advantages plus advantages of steps taken from the same state.

Importing this package registers the estimator ``gigpo`` and loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.trainer.ppo.registry import AdvantageResult, register_adv_est

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.config.schema import AlgorithmConfig

__all__ = ["gigpo"]


@register_adv_est("gigpo", needs_step_returns=True)
def gigpo(batch: DataProto, config: AlgorithmConfig) -> AdvantageResult:
    """``algorithm.gigpo`` applied to a rollout's rows; see :mod:`recipe.gigpo.core_gigpo`."""
    from recipe.gigpo.core_gigpo import gigpo_of_batch

    return gigpo_of_batch(batch, config)
