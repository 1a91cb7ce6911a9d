# SPDX-License-Identifier: Apache-2.0
"""Games, a shop and their policies, shared with the tests they come from."""

from __future__ import annotations

from tests.agent_system.webshop_manager.conftest import make_config, shop_dir
from tests.verl.trainer.conftest import games_and_policy

__all__ = ["games_and_policy", "make_config", "shop_dir"]
