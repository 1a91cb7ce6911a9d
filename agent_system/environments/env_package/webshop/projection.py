# SPDX-License-Identifier: Apache-2.0
"""Model text -> WebShop action. The rules follow published runs, so that their numbers stay comparable."""

from __future__ import annotations

from collections.abc import Sequence

from agent_system.environments.projection import project_tagged_action

__all__ = ["webshop_projection"]

_FALLBACK_CHARS = 20


def webshop_projection(
    actions: Sequence[str], action_pools: Sequence[Sequence[str]] | None = None
) -> tuple[list[str], list[int]]:
    """`search[...]` or `click[...]` and 0/1 format flags of model texts (see `project_tagged_action`).

    Args:
        actions: model texts; not changed.
        action_pools: accepted for old callers; what a page offers is the environment's business and not checked here.
    """
    projected = [project_tagged_action(text, _FALLBACK_CHARS) for text in actions]
    return [action for action, _ in projected], [int(valid) for _, valid in projected]
