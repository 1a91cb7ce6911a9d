# SPDX-License-Identifier: Apache-2.0
"""The WebShop benchmark runs, and sessions share what they read."""

from __future__ import annotations

import pytest

from tests.bench import bench_webshop


@pytest.mark.slow
def test_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_webshop.main(["--quick"]) == 0
    out = capsys.readouterr().out
    assert out.count("|---") >= 3 and f"{bench_webshop.FULL:,} (estimate)" in out
