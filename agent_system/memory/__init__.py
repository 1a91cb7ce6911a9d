# SPDX-License-Identifier: Apache-2.0
"""What an agent remembers of its episode, and how it is written into a prompt."""

from agent_system.memory.base import BaseMemory
from agent_system.memory.memory import SearchMemory, SimpleMemory

__all__ = ["BaseMemory", "SearchMemory", "SimpleMemory"]
