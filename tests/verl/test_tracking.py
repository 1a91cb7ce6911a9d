# SPDX-License-Identifier: Apache-2.0
"""Metrics logging: complete, valid JSON, and never a reason for a run to stop."""

from __future__ import annotations

import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.utils.tracking import Tracking, plain_value


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_any_value_becomes_valid_json(tmp_path: Path) -> None:
    import torch

    data = {
        "nan": math.nan,
        "inf": np.float32("inf"),
        "none": None,
        "float32": np.float32(0.5),
        "int64": np.int64(3),
        "bool": np.bool_(True),
        "scalar_array": np.array(2.5),
        "array": np.array([1.0, math.nan]),
        "tensor": torch.tensor(1.5),
        "tensors": torch.ones(2),
        "nested": {"list": [np.float64(1), None]},
        "object": object,
        "text": "so",
    }
    with Tracking("p", "e", [], tmp_path, {}) as tracking:
        tracking.log(data, step=np.int64(4))  # type: ignore[arg-type]
    (line,) = lines(tmp_path)
    assert line["step"] == 4
    assert line["nan"] is None and line["inf"] is None and line["none"] is None
    assert line["float32"] == 0.5 and line["int64"] == 3 and line["bool"] is True
    assert line["scalar_array"] == 2.5 and line["array"] == [1.0, None] and line["tensor"] == 1.5
    assert line["nested"] == {"list": [1.0, None]} and line["text"] == "so"
    assert isinstance(line["tensors"], str) and isinstance(line["object"], str)


def test_integers_stay_integers() -> None:
    assert isinstance(plain_value(np.int32(2)), int) and isinstance(plain_value(2), int)


def test_a_resumed_run_appends_and_drops_a_torn_line(tmp_path: Path) -> None:
    with Tracking("p", "e", [], tmp_path, {}) as tracking:
        tracking.log({"a": 1}, step=1)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"a": 2, "st')
    with Tracking("p", "e", [], tmp_path, {}) as tracking:
        tracking.log({"a": 3}, step=2)
    assert [(line["step"], line["a"]) for line in lines(tmp_path)] == [(1, 1), (2, 3)]


def test_the_console_line_has_numbers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracking("p", "e", ["console"], tmp_path, {}) as tracking:
        tracking.log({"a/b": 1.23456, "text": "x", "nan": math.nan, "n": np.int64(2)}, step=7)
    assert capsys.readouterr().out == "step:7 - a/b:1.235 - n:2.000\n"


def test_a_raising_backend_is_disabled_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    class Run:
        def log(self, data: dict[str, Any], step: int) -> None:
            calls.append(step)
            raise ConnectionError("no network")

    options: dict[str, Any] = {}

    def init(**kwargs: Any) -> Run:
        options.update(kwargs)
        return Run()

    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with caplog.at_level(logging.WARNING), Tracking("p", "e", ["wandb"], tmp_path / "run", {"k": 1}) as tracking:
        for step in range(3):
            tracking.log({"a": step}, step=step)
    assert calls == [0]
    assert [record.getMessage() for record in caplog.records if "wandb" in record.getMessage()] == [
        "tracker wandb is disabled, the run goes on: ConnectionError: no network"
    ]
    assert [line["a"] for line in lines(tmp_path / "run")] == [0, 1, 2]
    # Without a login it goes offline, and a resumed run is the same run.
    assert options["mode"] == "offline" and options["resume"] == "allow"
    first = options["id"]
    Tracking("p", "e", ["wandb"], tmp_path / "run", {}).close()
    assert options["id"] == first


def test_a_missing_or_unknown_backend_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING), Tracking("p", "e", ["wandb", "nosuch"], tmp_path, {}) as tracking:
        tracking.log({"a": 1}, step=1)
    assert len(caplog.records) == 2
    assert len(lines(tmp_path)) == 1


def test_an_unwritable_metrics_file_does_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with Tracking("p", "e", ["console"], tmp_path / "file" / "below", {}) as tracking:
        tracking.log({"a": 1}, step=1)
    assert "a:1.000" in capsys.readouterr().out


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracking("p", "e", ["tensorboard"], tmp_path, {}) as tracking:
        tracking.log({"a": np.float32(0.5), "text": "x", "none": None}, step=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["a"]
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(3, 0.5)]


def test_validation_episodes_go_where_texts_have_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, Any], int]] = []
    run = types.SimpleNamespace(log=lambda data, step: logged.append((data, step)), finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **kwargs: run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Tracking("p", "e", ["console", "wandb"], tmp_path, {}) as tracking:
        tracking.log_generations([], step=1)
        tracking.log_generations([("task", "answer", 10.0)], step=2)
    table = (["step", "input", "output", "score"], [[2, "task", "answer", 10.0]])
    assert logged == [({"val/generations": table}, 2)]
    assert lines(tmp_path) == []


def test_tensorboard_shows_validation_episodes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracking("p", "e", ["tensorboard"], tmp_path, {}) as tracking:
        tracking.log_generations([("task", "answer", 10.0)], step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert any("val/generations/0" in tag for tag in events.Tags()["tensors"])
