# SPDX-License-Identifier: Apache-2.0
"""Stage 1: find which steps of a success were necessary, by replaying the trajectory without them.

Programs: `collect` (play games with a scripted expert), `analyze` (label every step), `report` (tables). The RL recipe
calls `label_trajectories` directly.
"""

from agent_system.step_discriminator.trajectory_analyzer.adapters import (
    EnvAdapter,
    ReplayableGame,
    base_env_name,
    get_adapter,
    register_adapter,
    require_adapter,
)
from agent_system.step_discriminator.trajectory_analyzer.document import load_credit_analysis
from agent_system.step_discriminator.trajectory_analyzer.label import label_trajectories, revealing_steps
from agent_system.step_discriminator.trajectory_analyzer.records import KINDS, CreditOptions, CreditRecord, StepCredit
from agent_system.step_discriminator.trajectory_analyzer.replay import Replayer

__all__ = [
    "KINDS",
    "CreditOptions",
    "CreditRecord",
    "EnvAdapter",
    "ReplayableGame",
    "Replayer",
    "StepCredit",
    "base_env_name",
    "get_adapter",
    "label_trajectories",
    "load_credit_analysis",
    "register_adapter",
    "require_adapter",
    "revealing_steps",
]
