# SPDX-License-Identifier: Apache-2.0
"""One weight synchronisation for all turns of a training step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["RolloutWorkerGroup", "rollout_session"]

logger = logging.getLogger(__name__)

# Seconds that a failed rollout waits for its engines to be released.
_PATIENCE = 5.0


class RolloutWorkerGroup(Protocol):
    """What a worker group offers to a rollout."""

    def start_rollout(self, version: int) -> Any:
        """Bring the engines to the actor's present weights and call them ``version``."""

    def end_rollout(self) -> Any:
        """No generation until the next `start_rollout`."""


@contextmanager
def rollout_session(wg: RolloutWorkerGroup, version: int) -> Iterator[None]:
    """Inside the block ``wg.generate_sequences`` uses the actor's weights as they were at its start.

    ``version`` labels them (the global step) and must not fall. The engines are released when the block ends. After an
    exception that is not waited for longer than a few seconds: a rank may be in a collective with the one that failed.
    """
    wg.start_rollout(version)
    try:
        yield
    except BaseException:
        ending = threading.Thread(target=_end_after_failure, args=(wg,), daemon=True)
        ending.start()
        ending.join(_PATIENCE)
        raise
    wg.end_rollout()


def _end_after_failure(wg: RolloutWorkerGroup) -> None:
    try:
        wg.end_rollout()
    except Exception as error:  # noqa: BLE001 - what failed first is on its way to the user
        logger.warning("the rollout engines could not be released after a failure: %s", error)
