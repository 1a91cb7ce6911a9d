# SPDX-License-Identifier: Apache-2.0
"""Generated games: winnable, reproducible, split by scene, written whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agent_system.environments.env_package.alfworld import AlfworldGame
from agent_system.environments.env_package.alfworld.generate import ensure_generated, generate_games
from agent_system.environments.env_package.alfworld.generate_games import main
from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from agent_system.environments.env_package.alfworld.oracle import Oracle
from agent_system.environments.env_package.alfworld.package_data import load_tables
from verl.utils.errors import UserError

REPO_ROOT = Path(__file__).resolve().parents[3]


def _scenes(folder: Path, split: str) -> set[int]:
    files = (folder / "json_2.1.1" / split).glob("*/*/traj_data.json")
    return {json.loads(file.read_text())["scene"]["scene_num"] for file in files}


def test_every_game_is_won_by_its_plan_and_not_before(gamefiles: list[Path], small_gamefiles: list[Path]) -> None:
    types: Counter[str] = Counter()
    for file in gamefiles + small_gamefiles:
        game = AlfworldGame(file, engine="simulator")
        assert not game.reset()[1]["won"]
        plan = json.loads(file.read_text(encoding="utf-8"))["walkthrough"]
        assert plan == list(Oracle(game))
        outcomes = [game.step(command)[2] for command in plan]
        assert outcomes == [False] * (len(plan) - 1) + [True], file
        trajectory = json.loads((file.parent / "traj_data.json").read_text(encoding="utf-8"))
        assert trajectory["task_type"] == game.task_type == file.parent.parent.name.split("-")[0]
        types[game.task_type] += 1
    assert set(types) == set(TASK_TYPES) and min(types.values()) >= 30


def test_unseen_scenes_are_not_trained_on_and_seen_ones_are(games_dir: Path) -> None:
    train = _scenes(games_dir, "train")
    assert not train & _scenes(games_dir, "valid_unseen")
    assert _scenes(games_dir, "valid_seen") <= train


def test_names_are_unique_and_counts_right(games_dir: Path, gamefiles: list[Path]) -> None:
    names = [file.parent.name for file in gamefiles]
    assert len(set(names)) == len(names) == 60
    contents = {file.read_bytes() for file in gamefiles}
    assert len(contents) == 60
    assert len(load_manifest(games_dir, "train").games) == 36


def test_limits_are_kept(small_gamefiles: list[Path]) -> None:
    classes: set[str] = set()
    lamps = {name.lower() for name in load_tables().abilities["Toggleable"]}
    for file in small_gamefiles:
        data = AlfworldGame(file).data
        assert len(data.receptacles) <= 10
        classes |= {name.split(" ")[0] for name in data.objects}
    assert len(classes - lamps) <= 26


def test_equal_options_give_equal_games_in_every_process(tmp_path: Path) -> None:
    hashes = []
    for seed in ("0", "99"):
        out = tmp_path / seed
        command = [
            sys.executable, "-m", "agent_system.environments.env_package.alfworld.generate_games", "--out", str(out),
            "--train", "7", "--valid-seen", "3", "--valid-unseen", "2", "--seed", "8",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, env=environment, cwd=REPO_ROOT, check=True, capture_output=True)
        hashes.append([load_manifest(out, split).hash for split in ("train", "valid_seen", "valid_unseen")])
    assert hashes[0] == hashes[1]
    generate_games(tmp_path / "other", 7, 3, 2, seed=9)
    assert load_manifest(tmp_path / "other", "train").hash != hashes[0][0]
    # Asking for more games keeps the first ones.
    generate_games(tmp_path / "more", 9, 0, 0, seed=8)
    fewer = set(load_manifest(tmp_path / "0", "train").games)
    assert fewer < set(load_manifest(tmp_path / "more", "train").games)


def test_same_generation_is_kept_and_anything_else_refused(tmp_path: Path) -> None:
    out = tmp_path / "games"
    out.mkdir()  # an empty folder may exist
    generate_games(out, 2, 0, 1, seed=1)
    file = next(out.glob("json_2.1.1/train/*/*/game.tw-pddl"))
    written = file.stat().st_mtime_ns
    assert generate_games(out, 2, 0, 1, seed=1) == out
    assert file.stat().st_mtime_ns == written
    with pytest.raises(UserError, match="other options"):
        generate_games(out, 2, 0, 1, seed=2)
    file.write_text(file.read_text().replace("true", "true "))
    with pytest.raises(UserError, match="changed after generation"):
        generate_games(out, 2, 0, 1, seed=1)
    (out / "generation.json").unlink()
    with pytest.raises(UserError, match="not empty"):
        generate_games(out, 2, 0, 1, seed=1)


def test_a_failed_generation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_system.environments.env_package.alfworld import generate

    def full(root: Path, trial: str, game: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate, "_write_game", full)
    with pytest.raises(OSError, match="No space"):
        generate_games(tmp_path / "games", 2, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_ensure_generated_has_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = ensure_generated(train=1, valid_seen=0, valid_unseen=0)
    assert first == ensure_generated(train=1, valid_seen=0, valid_unseen=0)
    assert first != ensure_generated(train=1, valid_seen=0, valid_unseen=0, seed=1)
    assert first.parent == tmp_path / "trajevolve"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "games"
    counts = ["--train", "1", "--valid-seen", "1", "--valid-unseen", "0"]
    assert main(["--out", str(out), *counts]) == 0
    assert f"ALFWORLD_DATA={out}" in capsys.readouterr().out
    assert main(["--out", str(out), *counts, "--max-receptacles", "3"]) == 2
    assert main(["--out", str(tmp_path / "new"), *counts, "--max-receptacles", "3"]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 2 and "max_receptacles=3" in error
    assert not (tmp_path / "new").exists()


def test_manifest_hash_does_not_depend_on_creation_order(games_dir: Path, tmp_path: Path) -> None:
    source = games_dir / "json_2.1.1" / "valid_seen"
    folders = sorted(source.iterdir())
    for name, order in (("a", folders), ("b", folders[::-1])):
        for folder in order:
            shutil.copytree(folder, tmp_path / name / "json_2.1.1" / "valid_seen" / folder.name)
    first, second = (load_manifest(tmp_path / name, "valid_seen") for name in ("a", "b"))
    assert first.hash == second.hash and first.games == second.games
    assert first.games == tuple(sorted(first.games, key=lambda entry: entry.path))
    assert first.gamefile(first.games[0]).is_file()
    victim = first.gamefile(first.games[0])
    victim.write_text(victim.read_text() + "\n")
    assert load_manifest(tmp_path / "a", "valid_seen").hash != second.hash


def test_manifest_counts_what_it_leaves_out(games_dir: Path, tmp_path: Path) -> None:
    source = sorted((games_dir / "json_2.1.1" / "valid_seen").iterdir())
    root = tmp_path / "json_2.1.1" / "valid_seen"
    for folder in source[:6]:
        shutil.copytree(folder, root / folder.name)
    first, second, third, fourth, fifth = sorted(root.glob("*/*"))[:5]
    first.parent.rename(root / "pick_and_place_with_movable_recep-Spoon-Mug-Fridge-3")
    game = json.loads((second / "game.tw-pddl").read_text())
    (second / "game.tw-pddl").write_text(json.dumps({**game, "solvable": False}))
    (third / "game.tw-pddl").unlink()
    trajectory = json.loads((fourth / "traj_data.json").read_text())
    (fourth / "traj_data.json").write_text(json.dumps({**trajectory, "task_type": "other"}))
    (fifth / "traj_data.json").unlink()
    manifest = load_manifest(tmp_path, "valid_seen")
    reasons = ("movable receptacle", "unsolvable", "no game file", "other task type", "no traj_data.json")
    assert manifest.skipped == dict.fromkeys(reasons, 1)
    assert len(manifest.games) == len(list(root.glob("*/*"))) - 5
    (second / "game.tw-pddl").write_text("{")
    with pytest.raises(UserError, match="is unreadable"):
        load_manifest(tmp_path, "valid_seen")


def test_missing_data_names_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UserError) as caught:
        load_manifest(None, "train")
    for word in ("ALFWORLD_DATA", str(tmp_path / "nowhere"), "alfworld-download", "generate_games", "generated"):
        assert word in str(caught.value)
    with pytest.raises(UserError, match="valid_seen"):
        load_manifest(tmp_path, "validation")
