# SPDX-License-Identifier: Apache-2.0
"""AlfworldGame: recorded walks, snapshots, state keys, isolation."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from agent_system.environments.env_package.alfworld import AlfworldGame
from agent_system.environments.env_package.alfworld.goal import TASK_TYPES, parse_goal
from agent_system.environments.env_package.alfworld.oracle import Oracle
from agent_system.environments.env_package.alfworld.pddl import UnknownShapeError, parse_problem
from tests.agent_system.alfworld.walks import next_command
from verl.utils.errors import UserError

REPO_ROOT = Path(__file__).resolve().parents[3]


def _walk(game: AlfworldGame, seed: int, steps: int) -> list[tuple[str, str, float, bool, list[str], str]]:
    rng = np.random.default_rng(seed)
    _, info = game.reset()
    record = []
    for _ in range(steps):
        command = next_command(info["admissible_commands"], rng)
        observation, reward, done, info = game.step(command)
        record.append((command, observation, reward, done, info["admissible_commands"], game.state_key))
    return record


def test_recorded_walks_are_equal(shared_dir: Path) -> None:
    lines = (shared_dir / "compat/golden/alfworld_walks.jsonl").read_text(encoding="utf-8").splitlines()
    steps = 0
    for line in lines:
        walk = json.loads(line)
        game = AlfworldGame(shared_dir / "data/alfworld/json_2.1.1" / walk["game"], engine="simulator")
        observation, info = game.reset()
        assert (observation, info["admissible_commands"]) == (walk["reset_obs"], walk["reset_admissible"])
        assert info["task_type"] == walk["task_type"] and not info["won"]
        for step in walk["steps"]:
            observation, reward, done, info = game.step(step["action"])
            assert observation == step["obs"], step["action"]
            assert info["admissible_commands"] == step["admissible"], step["action"]
            assert (done, info["won"], reward) == (step["won"], step["won"], 10.0 if step["won"] else 0.0)
            steps += 1
    assert (len(lines), steps) == (12, 105)


def test_every_shared_game_is_won_by_its_oracle(shared_dir: Path) -> None:
    files = sorted((shared_dir / "data/alfworld").glob("json_2.1.1/*/*/*/game.tw-pddl"))
    assert len(files) == 13
    for file in files:
        game = AlfworldGame(file, engine="simulator")
        game.reset()
        outcomes = [game.step(command)[2] for command in Oracle(game)]
        assert outcomes == [False] * (len(outcomes) - 1) + [True], file
        assert game.task_type == json.loads((file.parent / "traj_data.json").read_text())["task_type"]


def test_infos_and_win(gamefiles: list[Path]) -> None:
    game = AlfworldGame(gamefiles[0])
    assert game.task.startswith("Your task is to: ") and game.task_type in TASK_TYPES
    observation, info = game.reset()
    assert observation.endswith(game.task)
    assert info["extra.gamefile"] == str(gamefiles[0])
    info["admissible_commands"].clear()  # the list is the caller's own
    assert "look" in game.step("look")[3]["admissible_commands"]
    for command in Oracle(game):
        _, reward, done, info = game.step(command)
    assert done and info["won"] and reward == 10.0
    assert game.step("look")[1:3] == (10.0, True)  # the win lasts until it is undone
    assert not game.reset()[1]["won"]


def test_step_before_reset_is_an_error(gamefiles: list[Path]) -> None:
    with pytest.raises(RuntimeError, match="before reset"):
        AlfworldGame(gamefiles[0]).step("look")


@pytest.mark.parametrize("command", ["", "  ", "LOOK", "take", "go to", "jump", "{look}", "take a from b", "\x00"])
def test_strange_commands_change_nothing(gamefiles: list[Path], command: str) -> None:
    game = AlfworldGame(gamefiles[0])
    _, info = game.reset()
    key = game.state_key
    observation, reward, done, after = game.step(command)
    assert (observation, reward, done) == ("Nothing happens.", 0.0, False)
    assert after["admissible_commands"] == info["admissible_commands"] and game.state_key == key


def test_restored_states_continue_identically(gamefiles: list[Path]) -> None:
    for seed, file in enumerate(gamefiles[::9]):
        game, other = AlfworldGame(file), AlfworldGame(file)
        rng = np.random.default_rng(seed)
        _, info = game.reset()
        snapshots, record = [], []
        for _ in range(60):
            snapshots.append((game.snapshot(), info, game.state_key))
            command = next_command(info["admissible_commands"], rng)
            observation, reward, done, info = game.step(command)
            record.append((command, (observation, reward, done, info)))
        for start in rng.permutation(60)[:15]:
            snapshot, expected_info, key = snapshots[start]
            # A snapshot survives pickling and serves another instance of the same game.
            assert other.restore(pickle.loads(pickle.dumps(snapshot))) == expected_info
            assert other.state_key == key
            for command, expected in record[start : start + 12]:
                assert other.step(command) == expected


def test_snapshot_of_another_game_is_refused(gamefiles: list[Path]) -> None:
    first, second = AlfworldGame(gamefiles[0]), AlfworldGame(gamefiles[1])
    first.reset()
    with pytest.raises(ValueError, match="belongs to game"):
        second.restore(first.snapshot())


def test_state_key_ignores_looking_and_sees_changes(gamefiles: list[Path]) -> None:
    game = AlfworldGame(gamefiles[0])
    _, info = game.reset()
    start = game.state_key
    for command in ("look", "inventory", "help", "nonsense"):
        game.step(command)
        assert game.state_key == start
    first, second = [c for c in info["admissible_commands"] if c.startswith("go to ")][:2]
    game.step(first)
    assert game.state_key != start
    there = game.state_key
    game.step(second)
    game.step(first)
    assert game.state_key == there
    other = AlfworldGame(gamefiles[1])
    other.reset()
    assert other.state_key != start


def test_texts_and_keys_are_equal_in_every_process(gamefiles: list[Path]) -> None:
    program = (
        "import sys, hashlib\n"
        "from tests.agent_system.alfworld.test_game import _walk, AlfworldGame\n"
        "for file in sys.argv[1:]:\n"
        "    print(hashlib.sha256(repr(_walk(AlfworldGame(file), 11, 80)).encode()).hexdigest())\n"
    )
    files = [str(file) for file in gamefiles[::20]]
    outputs = []
    for seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPO_ROOT)}
        command = [sys.executable, "-c", program, *files]
        done = subprocess.run(command, env=environment, cwd=REPO_ROOT, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.split())
    assert len(outputs[0]) == len(files) and outputs[0] == outputs[1] == outputs[2]


def test_games_do_not_influence_each_other(gamefiles: list[Path]) -> None:
    files = gamefiles[:3] + gamefiles[:1]  # one file twice: its constant facts are shared
    alone = [_walk(AlfworldGame(file), seed, 50) for seed, file in enumerate(files)]
    games = [AlfworldGame(file) for file in files]
    generators = [np.random.default_rng(seed) for seed in range(len(files))]
    infos = [game.reset()[1] for game in games]
    for step in range(50):
        for i, game in enumerate(games):
            command = next_command(infos[i]["admissible_commands"], generators[i])
            observation, reward, done, infos[i] = game.step(command)
            seen = (command, observation, reward, done, infos[i]["admissible_commands"], game.state_key)
            assert seen == alone[i][step]


def test_resets_do_not_collect_memory(gamefiles: list[Path]) -> None:
    game = AlfworldGame(gamefiles[0])
    _walk(game, 0, 20)
    gc.collect()
    tracemalloc.start()
    try:
        for seed in range(200):
            _walk(game, seed, 5)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 100_000


def test_unreadable_games_name_the_file(tmp_path: Path, gamefiles: list[Path]) -> None:
    for missing in (tmp_path / "game.tw-pddl", f"{tmp_path}/a\0b", tmp_path / ("x" * 5000)):
        with pytest.raises(UserError, match="does not exist"):
            AlfworldGame(missing)
    data = json.loads(gamefiles[0].read_text(encoding="utf-8"))
    for field in ("pddl_domain", "pddl_problem", "grammar"):
        half = tmp_path / "half.tw-pddl"
        half.write_text(json.dumps(data | {field: data[field] + "\ud800"}), encoding="utf-8")
        for engine in ("auto", "interpreter"):
            with pytest.raises(UserError, match=r"half\.tw-pddl cannot be read") as caught:
                AlfworldGame(half, engine)
            assert len(str(caught.value)) < 500
    broken = tmp_path / "broken.tw-pddl"
    broken.write_bytes(gamefiles[0].read_bytes()[:5000])
    with pytest.raises(UserError, match=r"broken\.tw-pddl cannot be read"):
        AlfworldGame(broken)
    broken.write_text('{"grammar": "", "pddl_problem": ""}')
    with pytest.raises(UserError, match="no 'pddl_domain' in it"):
        AlfworldGame(broken)


def test_damaged_games_name_the_file(tmp_path: Path, gamefiles: list[Path]) -> None:
    """A file that is not what it should be loads or gives a UserError with its name, never another exception."""
    data = json.loads(gamefiles[0].read_text(encoding="utf-8"))
    words = data["pddl_problem"].split()
    rng = np.random.default_rng(0)
    problems = [None, 7, "", "(", "(define)"]
    for _ in range(150):
        changed = list(words)
        for _ in range(rng.integers(1, 4)):
            place, other = (int(i) for i in rng.integers(len(words), size=2))
            changed[place] = ["", words[other], f"{words[place]} {words[other]}", f"{words[place]}x"][rng.integers(4)]
        problems.append(" ".join(changed))
    files = [{**data, "pddl_problem": problem} for problem in problems]
    files += [{**data, "grammar": grammar} for grammar in (None, "", data["grammar"].replace("task", "\\x"))]
    files += [{**data, "pddl_domain": None}, [], "text", None]
    refused = 0
    for number, content in enumerate(files):
        file = tmp_path / f"game{number}.tw-pddl"
        file.write_text(json.dumps(content), encoding="utf-8")
        try:
            AlfworldGame(file, engine="simulator").reset()
        except UserError as error:
            assert file.name in str(error)
            refused += 1
    assert refused > 20
    file.write_text("[" * 100_000)
    with pytest.raises(UserError, match=rf"{file.name} cannot be read"):
        AlfworldGame(file)


def test_unknown_domain_is_not_simulated(tmp_path: Path, gamefiles: list[Path]) -> None:
    data = json.loads(gamefiles[0].read_text(encoding="utf-8"))
    data["pddl_domain"] += "\n; another release"
    other = tmp_path / "game.tw-pddl"
    other.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UserError, match="another domain"):
        AlfworldGame(other, engine="simulator")


def test_goals_of_another_shape_are_not_guessed(gamefiles: list[Path]) -> None:
    text = json.loads(gamefiles[0].read_text(encoding="utf-8"))["pddl_problem"]
    assert parse_goal(parse_problem(text)).task_type in TASK_TYPES
    head = text[: text.index("(:goal")]
    for goal in (
        "(forall (?o - object) (isClean ?o))",
        "(exists (?o - object) (and (holds agent1 ?o)))",
        "(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) (objectType ?o MugType) "
        "(receptacleType ?r ShelfType) (opened ?r))))",
        "(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) (objectType ?o MugType))))",
    ):
        with pytest.raises(UnknownShapeError):
            parse_goal(parse_problem(f"{head}(:goal {goal}))"))
