# SPDX-License-Identifier: Apache-2.0
"""Leaving a rollout session, whatever happened inside."""

from __future__ import annotations

import threading

import pytest

from verl.workers.rollout import session


class Engines:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stuck: threading.Event | None = None

    def start_rollout(self, version: int) -> None:
        self.log.append(f"start {version}")

    def end_rollout(self) -> None:
        if self.stuck is not None:
            self.stuck.wait()
            raise RuntimeError("a rank died")
        self.log.append("end")


def test_engines_are_released_with_and_without_a_failure() -> None:
    engines = Engines()
    with session.rollout_session(engines, 3):
        assert engines.log == ["start 3"]
    with pytest.raises(ValueError, match="inside"), session.rollout_session(engines, 4):
        raise ValueError("inside")
    assert engines.log == ["start 3", "end", "start 4", "end"]


def test_a_rank_that_hangs_does_not_hide_what_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "_PATIENCE", 0.05)
    engines = Engines()
    engines.stuck = threading.Event()
    with pytest.raises(ValueError, match="out of memory"), session.rollout_session(engines, 0):
        raise ValueError("rank 0: out of memory")
    # Still waiting; what it runs into later is said and goes no further.
    [ending] = [thread for thread in threading.enumerate() if thread.daemon and "_end_after_failure" in thread.name]
    engines.stuck.set()
    ending.join()
    assert "a rank died" in caplog.text
