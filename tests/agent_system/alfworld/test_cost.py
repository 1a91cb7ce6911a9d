# SPDX-License-Identifier: Apache-2.0
"""What environments cost: memory of further ones, nothing kept by many resets, no file descriptors, few file reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_system.environments.env_package.alfworld import AlfworldGame, interpreted, manifest, problem
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from tests.agent_system.alfworld.other_domains import altered_game
from verl.utils.errors import UserError

REPO_ROOT = Path(__file__).resolve().parents[3]

# Prints, as JSON: MB per further environment with a game of its own, MB and descriptors gained by 500 resets.
_MEASURE = """
import gc, json, os, sys
from agent_system.environments.env_package.alfworld.envs import AlfworldEnv

def rss():
    gc.collect()
    with open('/proc/self/statm') as handle:
        return int(handle.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20

files = sys.argv[1:]
envs = []
def start(file):
    env = AlfworldEnv('/')
    env.reset({'gamefile': file})
    envs.append(env)

start(files[0])
before = rss()
for file in files[1:]:
    start(file)
per_env = (rss() - before) / (len(files) - 1)

def play(count):
    for number in range(count):
        env = envs[number % len(envs)]
        _, info = env.reset({'gamefile': files[number % len(files)]})
        for step in range(4):
            info = env.step(info['admissible_commands'][(number + 7 * step) % len(info['admissible_commands'])])[3]

play(100)
before, descriptors = rss(), len(os.listdir('/proc/self/fd'))
play(500)
library = 'libdownward' in open('/proc/self/maps').read()
print(json.dumps([per_env, rss() - before, len(os.listdir('/proc/self/fd')) - descriptors, library]))
"""


@pytest.mark.parametrize("kind", ["known", "other"])
def test_memory_and_five_hundred_resets(
    gamefiles: list[Path], small_gamefiles: list[Path], tmp_path: Path, kind: str
) -> None:
    # More games than a process keeps, or a few that take long to translate.
    files = [*gamefiles, *small_gamefiles[:30]]
    if kind == "other":
        files = [altered_game(file, tmp_path / str(number)) for number, file in enumerate(gamefiles[:4])]
    command = [sys.executable, "-c", _MEASURE, *map(str, files)]
    done = subprocess.run(command, cwd=REPO_ROOT, check=True, capture_output=True, text=True)
    per_env, grown, descriptors, library = json.loads(done.stdout)
    assert per_env < 10
    assert grown < 2 and descriptors == 0 and not library


def test_memory_of_slots_that_share_a_game_is_small(gamefiles: list[Path]) -> None:
    command = [sys.executable, "-c", _MEASURE, *[str(gamefiles[0])] * 200]
    done = subprocess.run(command, cwd=REPO_ROOT, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)[0] < 0.1


@pytest.mark.parametrize("kind", ["known", "other"])
def test_a_game_file_is_read_again_only_when_it_changed(
    small_gamefiles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = altered_game(small_gamefiles[0], tmp_path)
    if kind == "known":
        shutil.copy(small_gamefiles[0], file)
    read: list[str | Path] = []

    def read_game_file(path: str | Path) -> problem.GameFile:
        read.append(path)
        return original(path)

    original = problem.read_game_file
    for module in (problem, interpreted):
        monkeypatch.setattr(module, "read_game_file", read_game_file)
    first = AlfworldGame(file).reset()
    times = len(read)
    assert times == (1 if kind == "known" else 2)
    assert AlfworldGame(file).reset() == first and len(read) == times
    file.write_text(file.read_text() + "\n")
    assert AlfworldGame(file).reset() == first and len(read) == 2 * times


@pytest.mark.slow
def test_the_benchmark_reaches_its_targets() -> None:
    """All ratios are of one run."""
    command = [sys.executable, "-m", "tests.bench.bench_alfworld", "--quick"]
    done = subprocess.run(command, cwd=REPO_ROOT, check=True, capture_output=True, text=True)
    compared = 0
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for faster, target in ((3, 4), (6, 7)):
            if len(cells) == 8 and cells[target].endswith("x"):
                assert float(cells[faster][:-1].replace(",", "")) >= float(cells[target][:-1].replace(",", "")), line
                compared += 1
    assert compared == 6


@pytest.fixture
def data(games_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder whose files are older than two seconds, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(games_dir / "json_2.1.1", tmp_path / "data" / "json_2.1.1")
    for file in (tmp_path / "data").rglob("*"):
        os.utime(file, (1_700_000_000, 1_700_000_000))
    return tmp_path / "data"


def test_a_known_folder_is_not_read_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_manifest(data, "train")
    examined: list[str] = []
    original = manifest._examine

    def examine(root: Path, folder: str) -> dict[str, str]:
        examined.append(folder)
        return original(root, folder)

    monkeypatch.setattr(manifest, "_examine", examine)
    assert load_manifest(data, "train") == first and not examined
    assert load_manifest(f"{data}/../data/", "train").hash == first.hash and not examined
    # Changed, new and removed folders are noticed.
    changed, removed = first.gamefile(first.games[0]), first.gamefile(first.games[1])
    changed.write_text(changed.read_text() + " ")
    shutil.copytree(removed.parent, removed.parent.with_name("trial_new"))
    shutil.rmtree(removed.parent)
    second = load_manifest(data, "train")
    assert len(second.games) == len(first.games) and second.hash != first.hash
    assert len(examined) == 2
    # What was written a moment ago is read until it has settled.
    load_manifest(data, "train")
    assert changed.parent.name in {Path(folder).name for folder in examined[2:]}
    unsolvable = json.loads(changed.read_text()) | {"solvable": False}
    changed.write_text(json.dumps(unsolvable))
    assert load_manifest(data, "train").skipped == {"unsolvable": 1}


def test_a_damaged_manifest_cache_is_made_again(data: Path, tmp_path: Path) -> None:
    first = load_manifest(data, "train")
    (cached,) = (tmp_path / "cache").rglob("*.json.z")
    good = cached.read_bytes()
    for content in (b"", b"junk", good[: len(good) // 2]):
        cached.write_bytes(content)
        assert load_manifest(data, "train") == first
    for rows in ([], {"a/b": {}}, {"a/b": {"stamp": [1, 2, 3, 4]}}, {"a/b": 7}):
        manifest.write_cached(cached, json.dumps(rows).encode())
        assert load_manifest(data, "train") == first


def test_unreadable_folders_are_not_cached(data: Path) -> None:
    file = next(data.glob("json_2.1.1/train/*/*/game.tw-pddl"))
    file.write_text("{")
    for _ in range(2):
        with pytest.raises(UserError, match="is unreadable"):
            load_manifest(data, "train")
