# SPDX-License-Identifier: Apache-2.0
"""From environment rewards to token scores."""

from agent_system.reward_manager.episode import EpisodeRewardManager

__all__ = ["EpisodeRewardManager"]
