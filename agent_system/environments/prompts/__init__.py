# SPDX-License-Identifier: Apache-2.0
"""Prompt templates, one module per environment."""

from __future__ import annotations

from typing import Any

from agent_system.environments.prompts.alfworld import ALFWORLD_TEMPLATE, ALFWORLD_TEMPLATE_NO_HIS
from agent_system.environments.prompts.webshop import WEBSHOP_TEMPLATE, WEBSHOP_TEMPLATE_NO_HIS
from verl.utils.absent import absent_name

__all__ = ["ALFWORLD_TEMPLATE", "ALFWORLD_TEMPLATE_NO_HIS", "WEBSHOP_TEMPLATE", "WEBSHOP_TEMPLATE_NO_HIS"]


def __getattr__(name: str) -> Any:
    absent_name(__name__, name)
