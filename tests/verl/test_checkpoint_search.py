# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a run is the newest: the tracker decides, parts of a killed save are never chosen."""

from __future__ import annotations

from pathlib import Path

from verl.utils.checkpoint.checkpoint_manager import TRACKER_FILE, complete_steps, find_latest_ckpt_path

MARKER = "state/done.json"


def save(root: Path, step: int, *, whole: bool = True) -> str:
    folder = root / f"global_step_{step}"
    (folder / "state").mkdir(parents=True)
    if whole:
        (folder / MARKER).write_text("{}")
    return str(folder)


def test_the_tracker_wins_over_higher_steps(tmp_path: Path) -> None:
    second = save(tmp_path, 2)
    save(tmp_path, 10)
    (tmp_path / TRACKER_FILE).write_text("2\n")
    assert find_latest_ckpt_path(tmp_path, marker=MARKER) == second
    assert find_latest_ckpt_path(str(tmp_path)) == second


def test_parts_and_leftovers_are_never_chosen(tmp_path: Path) -> None:
    ninth = save(tmp_path, 9)
    save(tmp_path, 10, whole=False)
    save(tmp_path / "other", 11)
    (tmp_path / "global_step_12.tmp-123-abc").mkdir()
    (tmp_path / "global_step_13").write_text("a file")
    assert complete_steps(tmp_path, marker=MARKER) == [9]
    for tracked in ("10", "77", "x", None):
        tracker = tmp_path / TRACKER_FILE
        tracker.unlink(missing_ok=True)
        if tracked is not None:
            tracker.write_text(tracked)
        assert find_latest_ckpt_path(tmp_path, marker=MARKER) == ninth


def test_without_a_marker_only_the_tracker_tells(tmp_path: Path) -> None:
    assert find_latest_ckpt_path(tmp_path / "nowhere", marker=MARKER) is None
    assert complete_steps(tmp_path / "nowhere") == []
    save(tmp_path, 3)
    assert find_latest_ckpt_path(tmp_path) is None
    (tmp_path / TRACKER_FILE).write_text("4")
    assert find_latest_ckpt_path(tmp_path) is None
    steps = tmp_path / "named"
    (steps / "step-5").mkdir(parents=True)
    (steps / TRACKER_FILE).write_text("5")
    assert find_latest_ckpt_path(steps, "step-{}") == str(steps / "step-5")
