# SPDX-License-Identifier: Apache-2.0
"""Files are whole or absent; paths are checked with the key they came from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils import fs
from verl.utils.errors import UserError


def test_atomic_write_creates_parents_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.txt"
    fs.atomic_write(target, "one\n")
    fs.atomic_write(target, "zw\u00f6lf".encode())
    assert target.read_text(encoding="utf-8") == "zw\u00f6lf"
    assert [path.name for path in target.parent.iterdir()] == ["b.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    target = tmp_path / "file.json"
    fs.atomic_write(target, "old")

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, broken, crash)
    with pytest.raises(KeyboardInterrupt):
        fs.atomic_write(target, "new")
    monkeypatch.undo()
    assert target.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_atomic_dir_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "step_1"
    with pytest.raises(RuntimeError), fs.atomic_dir(target) as folder:
        (folder / "part").write_text("x", encoding="utf-8")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with fs.atomic_dir(target) as folder:
        assert folder.parent == tmp_path and folder.name.startswith("step_1.tmp-")
        assert not target.exists()
        (folder / "part").write_text("x", encoding="utf-8")
    assert (target / "part").read_text(encoding="utf-8") == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_atomic_dir_replaces_only_when_told(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with fs.atomic_dir(target) as folder:
        (folder / "old").touch()
    with pytest.raises(FileExistsError, match="out exists already"), fs.atomic_dir(target):
        pass
    with pytest.raises(RuntimeError), fs.atomic_dir(target, overwrite=True) as folder:
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["old"]
    with fs.atomic_dir(target, overwrite=True) as folder:
        (folder / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_first_of_two_to_finish_a_folder_wins(tmp_path: Path) -> None:
    """The other one's folder is removed, and the winner's was never moved: somebody may read it already."""
    target = tmp_path / "out"
    with pytest.raises(FileExistsError, match="out exists already"), fs.atomic_dir(target) as late:
        (late / "late").touch()
        with fs.atomic_dir(target) as early:
            (early / "early").touch()
        winner = target.stat().st_ino
    assert target.stat().st_ino == winner and [path.name for path in target.iterdir()] == ["early"]
    assert list(tmp_path.iterdir()) == [target]


def test_an_empty_folder_may_be_filled_and_nothing_else(tmp_path: Path) -> None:
    empty, file, link = tmp_path / "empty", tmp_path / "file", tmp_path / "link"
    empty.mkdir()
    with fs.atomic_dir(empty) as folder:
        (folder / "x").touch()
    assert [path.name for path in empty.iterdir()] == ["x"]
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    for taken in (file, link):
        with pytest.raises(FileExistsError, match="exists already"), fs.atomic_dir(taken):
            pass
    assert sorted(tmp_path.iterdir()) == [empty, file, link]


@pytest.mark.parametrize("meanwhile", ["gone", "replaced"])
def test_replacing_what_another_process_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    target = tmp_path / "out"
    with fs.atomic_dir(target) as folder:
        (folder / "old").touch()
    real = os.replace

    def with_another(source: str | Path, destination: str | Path) -> None:
        if Path(source) == target and meanwhile == "gone":
            real(target, tmp_path / "elsewhere")
        if Path(destination) == target and meanwhile == "replaced":
            target.mkdir()
            (target / "other").touch()
        real(source, destination)

    monkeypatch.setattr(os, "replace", with_another)
    if meanwhile == "replaced":
        with pytest.raises(FileExistsError, match="out exists already"), fs.atomic_dir(target, overwrite=True):
            pass
    else:
        with fs.atomic_dir(target, overwrite=True) as folder:
            (folder / "new").touch()
    assert [path.name for path in target.iterdir()] == [{"gone": "new", "replaced": "other"}[meanwhile]]
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_all_files_of_a_folder_are_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def replace(source: str | Path, destination: str | Path) -> None:
        synced.append("renamed")
        real_replace(source, destination)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    with fs.atomic_dir(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        for name in ("a", "inner/b"):
            (folder / name).write_text("x")
        (folder / "link").symlink_to("a")
    assert {"a", "b", "inner"} <= set(synced[: synced.index("renamed")]) and "link" not in synced


def test_a_failed_swap_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    with fs.atomic_dir(target) as folder:
        (folder / "old").touch()
    real = os.replace

    def fail_for_new(source: str | Path, destination: str | Path) -> None:
        if ".tmp-old-" not in str(source) and Path(destination) == target:
            raise OSError("disk")
        real(source, destination)

    monkeypatch.setattr(os, "replace", fail_for_new)
    with pytest.raises(OSError, match="disk"), fs.atomic_dir(target, overwrite=True):
        pass
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_paths_are_checked_with_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "file").touch()
    assert fs.copy_to_local("~/model", "k") == str(tmp_path / "model")
    assert fs.copy_to_local("model", "k") == "model"
    assert fs.copy_to_local("Qwen/Qwen2.5-1.5B-Instruct", "k") == "Qwen/Qwen2.5-1.5B-Instruct"
    assert fs.copy_to_local("gpt2", "k") == "gpt2"
    for missing in ("./other", "/no/such", "~/other", "a/b/c", "model/inner", "with space", ""):
        with pytest.raises(UserError, match=r"model\.path"):
            fs.copy_to_local(missing, "model.path")
    with pytest.raises(UserError, match="hdfs"):
        fs.copy_to_local("hdfs://a/b", "k")
    assert fs.require_dir("model", "k") == Path("model") and fs.require_file("file", "k") == Path("file")
    with pytest.raises(UserError, match=r"data\.dir=file: the folder file is not a folder"):
        fs.require_dir("file", "data.dir")
    with pytest.raises(UserError, match=r"data\.file=nothing: the file nothing does not exist"):
        fs.require_file("nothing", "data.file")


def _dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    dead, alive, end = _dead_pid(), os.getppid(), "ab12_xyz"
    target, folder = tmp_path / "report.json", tmp_path / "model"
    folder.mkdir()
    stays = [
        tmp_path / f".report.json.tmp-{alive}-{end}",
        tmp_path / f".other.json.tmp-{dead}-{end}",
        tmp_path / "report.json.tmp-notes",
        folder / "weights.bin",
    ]
    goes = [tmp_path / f".report.json.tmp-{dead}-{end}", folder / f".config.json.tmp-{dead}-{end}"]
    for path in (*stays, *goes):
        path.write_text("x")
    copy = tmp_path / f"model.tmp-{dead}-{end}"
    (copy / "inner").mkdir(parents=True)
    fs.remove_leftovers(target)
    fs.remove_leftovers(folder)
    assert all(path.exists() for path in stays) and not any(path.exists() for path in (*goes, copy))
    fs.remove_leftovers(tmp_path / "no" / "such" / "place")


def test_a_folder_killed_away_in_the_middle_of_its_replacement_comes_back(tmp_path: Path) -> None:
    target = tmp_path / "model"
    aside = tmp_path / f"model.tmp-old-{_dead_pid()}-ab12_xyz"
    (aside / "model").mkdir(parents=True)
    (aside / "model" / "config.json").write_text("old")
    fs.remove_leftovers(target)
    assert (target / "config.json").read_text() == "old" and sorted(tmp_path.iterdir()) == [target]


KILLED_WRITER = """
import os, signal, sys
from verl.utils import fs
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
fs.atomic_write(sys.argv[1], "half")
"""


def test_a_killed_write_is_recognised(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(target)], timeout=60)
    assert done.returncode < 0 and len(list(tmp_path.iterdir())) == 1
    fs.remove_leftovers(target)
    assert list(tmp_path.iterdir()) == []
