# SPDX-License-Identifier: Apache-2.0
"""One weight synchronisation for all turns of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["RolloutWorkerGroup", "rollout_session"]


class RolloutWorkerGroup(Protocol):
    """What a worker group offers to a rollout."""

    def start_rollout(self, version: int) -> Any:
        """Bring the engines to the actor's present weights and call them ``version``."""

    def end_rollout(self) -> Any:
        """No generation until the next `start_rollout`."""


@contextmanager
def rollout_session(wg: RolloutWorkerGroup, version: int) -> Iterator[None]:
    """Inside the block ``wg.generate_sequences`` uses the actor's weights as they were at its start.

    ``version`` labels them (the global step) and must not fall. The engines are released when the block ends, also
    by an exception.
    """
    wg.start_rollout(version)
    try:
        yield
    finally:
        wg.end_rollout()
