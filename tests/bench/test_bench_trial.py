# SPDX-License-Identifier: Apache-2.0
"""The cost table of TRIAL in its quick size."""

from __future__ import annotations

import sys

import pytest

from tests.bench import bench_trial


@pytest.mark.slow
def test_quick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_trial", "--quick"])
    bench_trial.main()
    out = capsys.readouterr().out
    assert "hindsight log-probs" in out and "share of the step" in out and "row by row" in out
