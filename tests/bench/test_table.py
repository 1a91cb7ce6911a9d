# SPDX-License-Identifier: Apache-2.0
"""The helper of the benchmarks, and that the one of this folder's programs that compares results still agrees."""

from __future__ import annotations

import sys

import pytest

from tests.bench import bench_advantages
from tests.bench.table import environment_line, format_seconds, print_table, time_best


def test_the_fastest_call_counts() -> None:
    calls: list[int] = []
    assert 0.0 <= time_best(lambda: calls.append(1), repeat=3) < 1.0
    assert len(calls) == 3
    time_best(lambda: calls.append(1), repeat=1, min_time=1e-4)
    assert len(calls) > 4
    with pytest.raises(ValueError, match="repeat"):
        time_best(lambda: None, repeat=0)


def test_a_markdown_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "time"], [["a", format_seconds(2.5)], ["bcdefg", format_seconds(0.0125)]])
    assert capsys.readouterr().out.splitlines() == [
        "| name   |    time |",
        "|--------|--------:|",
        "| a      |   2.5 s |",
        "| bcdefg | 12.5 ms |",
    ]
    assert format_seconds(3.21e-6) == "3.21 us"
    with pytest.raises(ValueError, match="2 columns"):
        print_table(["a", "b"], [["only one"]])


def test_the_environment_is_named() -> None:
    line = environment_line(["numpy"])
    assert "cores" in line and "Python" in line and "numpy" in line and "\n" not in line


def test_advantages_agree_with_the_per_row_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_advantages", "--quick"])
    bench_advantages.main()
    names = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert {"step returns", "exact grouping", "similarity grouping, 0.95", "gigpo", "hgpo", "gae"} <= set(names)
