# SPDX-License-Identifier: Apache-2.0
"""The rollout benchmarks run, and what they play is the same in every row."""

from __future__ import annotations

import re

import pytest

from tests.bench import bench_hf_engine, bench_rollout


@pytest.mark.slow
def test_rollouts(capsys: pytest.CaptureFixture[str], ray_session: None) -> None:
    assert bench_rollout.main(["--quick", "--engines", "hf"]) == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| hf")]
    assert len(lines) == 5
    tokens, finished, equal = ([line[column].strip() for line in lines] for column in (3, 4, 10))
    assert int(finished[0]) > 0 and finished[1:] == ["0"] * 4
    assert {int(count) - int(wasted) for count, wasted in zip(tokens, finished)} == {int(tokens[1])}
    assert all(re.fullmatch(r"(\d+) of \1", cell) for cell in equal)


@pytest.mark.slow
def test_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_hf_engine.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("decode steps") == 4
