# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: whole or absent, found again, rotated; crashes at every point leave the previous one usable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.trainer.ppo.checkpointing import LATEST_FILE, STATE_FILE, CheckpointStore, TrainerState, load_state
from verl.utils.errors import UserError


def state(step: int) -> TrainerState:
    return TrainerState(step, step, 1, {"value": 0.1}, {"position": 3 * step}, {"recipe": {"seen": step}})


def write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_text("w")


class Killed(BaseException):
    """Stands for the process being killed: no handler may turn it into anything else."""


def test_round_trip_and_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    assert store.find("auto", None) is None
    store.save(state(1), write)
    folder = store.save(state(2), write)
    assert store.find("auto", None) == folder == tmp_path / "run" / "global_step_2"
    assert load_state(folder) == state(2)
    assert (folder / "actor" / "weights").read_text() == "w"
    assert (tmp_path / "run" / LATEST_FILE).read_text().strip() == "2"
    assert store.find("disable", None) is None


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep={"actor": 2})
    for step in (2, 9, 10, 11):
        store.save(state(step), write)
    assert store.complete_steps() == [10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_11", LATEST_FILE]
    CheckpointStore(tmp_path, keep={"actor": 1}).save(state(12), write)
    assert store.complete_steps() == [12]


def test_parts_rotate_on_their_own(tmp_path: Path) -> None:
    def write_both(folder: Path) -> None:
        for name in ("actor", "critic", "hooks"):
            (folder / name).mkdir()

    def parts(step: int) -> list[str]:
        folder = tmp_path / f"global_step_{step}"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    store = CheckpointStore(tmp_path, keep={"actor": 3, "critic": 1})
    for step in (1, 2, 3, 4):
        store.save(state(step), write_both)
    assert [parts(step) for step in (1, 2, 3)] == [[], ["actor"], ["actor"]]
    assert parts(4) == ["actor", "critic", "hooks", STATE_FILE]
    # What lost a part is no checkpoint to resume from.
    assert store.complete_steps() == [4]
    CheckpointStore(tmp_path, keep={"actor": 1, "critic": 2}).save(state(5), write_both)
    assert [parts(step) for step in (2, 3, 4)] == [[], [], ["critic"]]
    CheckpointStore(tmp_path, keep={"actor": None, "critic": None}).save(state(6), write_both)
    assert store.complete_steps() == [5, 6]


def test_failure_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep={"actor": 1})
    store.save(state(1), write)

    def fails(folder: Path) -> None:
        write(folder)
        raise Killed

    with pytest.raises(Killed):
        store.save(state(2), fails)
    assert store.find("auto", None) == store.folder(1)


def test_leftovers_of_a_kill_are_never_chosen_and_are_removed_later(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), write)
    aside = tmp_path / "global_step_2.tmp-abc"
    aside.mkdir()
    write(aside)
    (aside / STATE_FILE).write_text("{}")
    (tmp_path / "global_step_3").mkdir()
    assert store.complete_steps() == [1]
    assert store.find("auto", None) == store.folder(1)
    store.save(state(2), write)
    assert not aside.exists()


def test_kill_between_rename_and_latest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep={"actor": 1})
    store.save(state(1), write)

    def killed(step: int) -> None:
        raise Killed

    monkeypatch.setattr(store, "_point_to", killed)
    with pytest.raises(Killed):
        store.save(state(2), write)
    fresh = CheckpointStore(tmp_path, keep={"actor": 1})
    assert fresh.complete_steps() == [1, 2]
    assert fresh.find("auto", None) == fresh.folder(1)
    fresh.save(state(2), write)
    assert fresh.find("auto", None) == fresh.folder(2) and fresh.complete_steps() == [2]


def test_latest_file_that_lies_is_reported_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(4), write)
    (tmp_path / LATEST_FILE).write_text("7")
    assert store.find("auto", None) == store.folder(4)
    assert "names step 7" in caplog.text
    (tmp_path / LATEST_FILE).write_text("x")
    assert store.find("auto", None) == store.folder(4)


def test_given_folder_must_be_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.save(state(4), write)
    assert store.find("resume_path", str(folder)) == folder
    with pytest.raises(UserError, match=r"trainer.resume_from_path"):
        store.find("resume_path", None)
    with pytest.raises(UserError, match=STATE_FILE):
        store.find("resume_path", str(tmp_path))


def test_damaged_state_is_a_user_error(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(state(4), write)
    good = json.loads((folder / STATE_FILE).read_text())
    for text in ("{", json.dumps(good | {"version": 99}), json.dumps(good | {"surprise": 1}), "[]"):
        (folder / STATE_FILE).write_text(text)
        with pytest.raises(UserError, match=r"trainer_state.json"):
            load_state(folder)
