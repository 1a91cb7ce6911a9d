# SPDX-License-Identifier: Apache-2.0
"""Our engines against the stock engine on random walks: every text, command list, outcome and state must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from agent_system.environments.env_package.alfworld import AlfworldGame
from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from agent_system.environments.env_package.alfworld.oracle import Oracle
from tests.agent_system.alfworld.other_domains import altered_game, lamps_game
from tests.agent_system.alfworld.walks import next_command
from verl.utils.errors import UserError

pytestmark = pytest.mark.slow


class _Pair:
    """Both engines in lockstep."""

    def __init__(self, file: Path, engine: Literal["simulator", "interpreter"] = "simulator") -> None:
        self.fast, self.stock = AlfworldGame(file, engine=engine), AlfworldGame(file, engine="stock")
        self._compare_keys = engine == "simulator"
        self._keys: dict[str, str] = {}
        self._back: dict[str, str] = {}

    def reset(self) -> list[str]:
        observation, info = self.fast.reset()
        assert (observation, info) == self.stock.reset()
        assert self.fast.task == self.stock.task
        self._same_states()
        return info["admissible_commands"]

    def step(self, command: str) -> list[str]:
        expected = self.stock.step(command)
        result = self.fast.step(command)
        assert result == expected, command
        self._same_states()
        return result[3]["admissible_commands"]

    def _same_states(self) -> None:
        """The state keys of both engines distinguish the same states (in the known domain: the stock engine's key is
        made from its record of facts, which drifts where effects have conditions)."""
        if not self._compare_keys:
            return
        fast, stock = self.fast.state_key, self.stock.state_key
        assert self._keys.setdefault(fast, stock) == stock and self._back.setdefault(stock, fast) == fast

    def walk(self, steps: int, seed: int, commands: list[str]) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            commands = self.step(next_command(commands, rng))


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_fresh_games(tmp_path: Path, task_type: str) -> None:
    """Ten new games of every task type, in whole rooms and in small ones."""
    number = TASK_TYPES.index(task_type)
    small = generate_games(tmp_path / "small", 54, 0, 0, seed=101, max_receptacles=9, max_object_classes=24)
    whole = generate_games(tmp_path / "whole", 6, 0, 0, seed=102)
    files = [*small.glob("json_2.1.1/train/*/*/game.tw-pddl"), *whole.glob("json_2.1.1/train/*/*/game.tw-pddl")]
    mine = sorted(file for file in files if file.parent.parent.name.startswith(f"{task_type}-"))
    assert len(mine) == 10
    for seed, file in enumerate(mine):
        pair = _Pair(file)
        pair.walk(25, 1000 * number + seed, pair.reset())


def test_other_domain(tmp_path: Path) -> None:
    """Subtypes, quantifiers, derived facts, conditional effects, negations, two actions with one command."""
    pair = _Pair(lamps_game(tmp_path / "lamps"), "interpreter")
    for seed in range(6):
        rng = np.random.default_rng(seed)
        commands = pair.reset()
        for _ in range(60):
            commands = pair.step(str(rng.choice(commands)))


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_altered_release(small_gamefiles: list[Path], tmp_path: Path, task_type: str) -> None:
    file = next(file for file in small_gamefiles if file.parent.parent.name.startswith(task_type))
    pair = _Pair(altered_game(file, tmp_path), "interpreter")
    pair.walk(60, 7, pair.reset())


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_generated_games(small_gamefiles: list[Path], task_type: str) -> None:
    file = next(file for file in small_gamefiles if file.parent.parent.name.startswith(task_type))
    pair = _Pair(file)
    pair.walk(80, 1, pair.reset())
    commands = pair.reset()
    for command in Oracle(pair.fast):
        commands = pair.step(command)
    assert pair.fast.step("look")[2] and pair.stock.step("look")[2]
    pair.walk(30, 2, commands)  # the game goes on after a win


def test_real_game(shared_dir: Path) -> None:
    folder = shared_dir / "data/alfworld/json_2.1.1/train"
    pair = _Pair(next(folder.glob("pick_heat*Potato*-14/*/game.tw-pddl")))
    pair.walk(80, 3, pair.reset())


def test_states_of_matter(shared_dir: Path) -> None:
    """Every sentence about sliced, clean, hot and cold things, in one kitchen."""
    folder = shared_dir / "data/alfworld/json_2.1.1/train"
    pair = _Pair(next(folder.glob("pick_heat*Potato*-14/*/game.tw-pddl")))
    pair.reset()
    script = """go to countertop 1; take knife 1 from countertop 1; go to countertop 2; slice potato 1 with knife 1;
    move knife 1 to countertop 2; take potato 1 from countertop 2; examine potato 1; go to sinkbasin 1;
    clean potato 1 with sinkbasin 1; examine potato 1; go to microwave 1; heat potato 1 with microwave 1;
    examine potato 1; go to fridge 1; cool potato 1 with fridge 1; examine potato 1; open fridge 1;
    move potato 1 to fridge 1; close fridge 1; examine fridge 1; take potato 1 from fridge 1; go to countertop 2;
    take apple 2 from countertop 2; go to microwave 1; heat apple 2 with microwave 1; examine apple 2; go to fridge 1;
    cool apple 2 with fridge 1; examine apple 2; go to sinkbasin 1; clean apple 2 with sinkbasin 1; examine apple 2"""
    texts = []
    for command in script.split(";"):
        texts.append(pair.stock.step(command)[0])
        assert pair.fast.step(command)[0] == texts[-1], command
    assert "This is a cool and clean sliced potato 1." in texts and "This is a cold apple 2." in texts


def test_things_moved_between_neighbours_lie_beside_them(small_gamefiles: list[Path]) -> None:
    for file in small_gamefiles:
        data = AlfworldGame(file).data
        for place, things in enumerate(data.start.contents):
            for other in data.receptacles_at[data.location_of[place]]:
                both = data.fits[place] & data.fits[other] & data.pickupable
                closed = data.openable >> place & 1 or data.openable >> other & 1
                movable = [o for o in things if both >> o & 1]
                if other == place or closed or not movable:
                    continue
                name, here, there = data.objects[movable[0]], data.receptacles[place], data.receptacles[other]
                pair = _Pair(file)
                pair.reset()
                for command in (f"go to {here}", f"take {name} from {here}", "look", f"move {name} to {there}"):
                    pair.step(command)
                assert f"Next to it, you see a {name}." in pair.fast.step("look")[0]
                pair.stock.step("look")
                for command in (f"take {name} from {there}", "look", f"move {name} to {here}", "look"):
                    pair.step(command)
                return
    pytest.skip("no two open receptacles share a place in these games")


def test_unusual_starts(small_gamefiles: list[Path], tmp_path: Path) -> None:
    """Facts that games of this release do not start with but the domain allows."""
    file = next(file for file in small_gamefiles if file.parent.parent.name.startswith(TASK_TYPES[1]))
    data = json.loads(file.read_text(encoding="utf-8"))
    words = [line.strip(" ()").split() for line in data["pddl_problem"].splitlines()]
    lamp = next(w[1] for w in words if w[:1] == ["toggleable"])
    thing = next(w[1] for w in words if w[:1] == ["pickupable"])
    place, location = next(w[1:] for w in words if w[:1] == ["receptacleAtLocation"])
    start = next(w for w in words if w[:1] == ["atLocation"])
    facts = [f"pickupable {lamp}", f"isToggled {lamp}", f"isHot {thing}", f"inReceptacle {thing} {place}"]
    facts += [f"isReceptacleObject {thing}", f"inReceptacleObject {lamp} {thing}"]
    facts += [f"opened {w[1]}" for w in words if w[:1] == ["openable"]][:2]
    problem = data["pddl_problem"].replace(" ".join(start), f"atLocation agent1 {location}")
    added = "".join(f"\n    ({fact})" for fact in dict.fromkeys(facts) if fact not in problem)
    data["pddl_problem"] = problem.replace("(:init", f"(:init{added}")
    other = tmp_path / file.parent.parent.name / "trial" / "game.tw-pddl"
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps(data), encoding="utf-8")
    pair = _Pair(other)
    assert pair.fast.reset()[0].splitlines()[2].startswith("You are facing the ")
    pair.walk(60, 4, pair.reset())


@pytest.mark.parametrize(
    "change",
    [
        {"pddl_domain": ""},
        {"pddl_domain": "(define (domain other)", "pddl_problem": "(define"},
        {"grammar": "{ not a grammar"},
    ],
)
def test_files_that_no_engine_can_load_are_named(
    small_gamefiles: list[Path], tmp_path: Path, change: dict[str, str]
) -> None:
    data = json.loads(small_gamefiles[0].read_text(encoding="utf-8"))
    other = tmp_path / "game.tw-pddl"
    other.write_text(json.dumps(data | change), encoding="utf-8")
    for engine in ("interpreter", "stock"):
        with pytest.raises(UserError, match=r"game\.tw-pddl cannot be loaded"):
            AlfworldGame(other, engine).reset()
