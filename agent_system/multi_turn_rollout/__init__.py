# SPDX-License-Identifier: Apache-2.0
"""The agent loop: prompts -> generation -> environment steps -> rows and episode records; validation."""

from agent_system.multi_turn_rollout.result import RolloutResult
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.utils import adjust_batch
from agent_system.multi_turn_rollout.validation import ValidationResult, Validator

__all__ = ["RolloutResult", "TrajectoryCollector", "ValidationResult", "Validator", "adjust_batch"]
