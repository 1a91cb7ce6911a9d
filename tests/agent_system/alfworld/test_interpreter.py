# SPDX-License-Identifier: Apache-2.0
"""The interpreter for other domains: the simulator's equal where both can play; its translation cache; its limits.
(`test_stock_parity.py` compares it with the stock engine.)"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent_system.environments.env_package.alfworld import AlfworldGame, interpreted, translation
from agent_system.environments.env_package.alfworld.cache import cache_dir
from agent_system.environments.env_package.alfworld.goal import TASK_TYPES
from agent_system.environments.env_package.alfworld.oracle import Oracle
from tests.agent_system.alfworld.other_domains import (
    LAMPS_DOMAIN,
    LAMPS_GRAMMAR,
    LAMPS_PROBLEM,
    altered_game,
    lamps_game,
    write_game,
)
from tests.agent_system.alfworld.walks import next_command
from verl.utils.errors import UserError


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has loaded nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    interpreted._cache.clear()
    return cache_dir() / "alfworld-translations"


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_it_equals_the_simulator(small_gamefiles: list[Path], task_type: str) -> None:
    file = next(file for file in small_gamefiles if file.parent.parent.name.startswith(task_type))
    simulated, interpreted_game = AlfworldGame(file, "simulator"), AlfworldGame(file, "interpreter")
    keys: dict[str, str] = {}
    back: dict[str, str] = {}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        expected = simulated.reset()
        assert interpreted_game.reset() == expected
        commands = expected[1]["admissible_commands"]
        for command in Oracle(simulated) if seed == 0 else [""] * 60:
            command = command or next_command(commands, rng)
            result = simulated.step(command)
            assert interpreted_game.step(command) == result, command
            commands = result[3]["admissible_commands"]
            one, other = simulated.state_key, interpreted_game.state_key
            assert keys.setdefault(one, other) == other and back.setdefault(other, one) == one
        assert seed or result[2], "the plan wins"


def test_other_files_are_interpreted_by_default(small_gamefiles: list[Path], tmp_path: Path) -> None:
    game = AlfworldGame(altered_game(small_gamefiles[0], tmp_path))
    observation, info = game.reset()
    assert game.task == AlfworldGame(small_gamefiles[0]).task and observation.endswith(game.task)
    assert info["task_type"] in TASK_TYPES
    with pytest.raises(UserError, match="facts are not available"):
        game.data  # noqa: B018


def test_snapshots_continue_identically(tmp_path: Path) -> None:
    file = lamps_game(tmp_path / "lamps")
    game, other = AlfworldGame(file), AlfworldGame(file)
    rng = np.random.default_rng(0)
    _, info = game.reset()
    record = []
    for _ in range(50):
        command = str(rng.choice(info["admissible_commands"]))
        before = (pickle.loads(pickle.dumps(game.snapshot())), info, game.state_key)
        result = game.step(command)
        info = result[3]
        record.append((*before, command, result))
    for start in rng.permutation(50)[:12]:
        snapshot, expected, key, *_ = record[start]
        assert other.restore(snapshot) == expected and other.state_key == key
        for *_, command, result in record[start : start + 10]:
            assert other.step(command) == result


def test_equal_keys_mean_equal_futures(tmp_path: Path, small_gamefiles: list[Path]) -> None:
    for file in (lamps_game(tmp_path / "lamps"), altered_game(small_gamefiles[1], tmp_path)):
        game = AlfworldGame(file)
        futures: dict[tuple[str, str], tuple[bool, list[str], str]] = {}
        met = 0
        for seed in range(4):
            rng = np.random.default_rng(seed)
            commands = game.reset()[1]["admissible_commands"]
            for _ in range(150):
                before, command = game.state_key, str(rng.choice(commands))
                _, _, won, info = game.step(command)
                commands = info["admissible_commands"]
                future = (won, commands, game.state_key)
                met += (before, command) in futures
                assert futures.setdefault((before, command), future) == future
        assert met > 50
        game.reset()
        first = game.state_key
        game.step("look")
        assert game.state_key == first


def test_the_translation_is_made_once_and_found_again(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lamps_game(tmp_path / "lamps")
    first = AlfworldGame(file).reset()
    (cached,) = own_cache.rglob("*.json.z")
    assert cached.parent.name == f"v{translation._FORMAT_VERSION}"
    interpreted._cache.clear()
    with monkeypatch.context() as patch:
        patch.setattr(translation, "translate", lambda domain, problem: pytest.fail("translated again"))
        assert AlfworldGame(file).reset() == first
        # Another path with the same content, and another grammar, need no translation either.
        other = write_game(tmp_path / "b", LAMPS_DOMAIN, LAMPS_GRAMMAR.replace("Lamps.", "Candles."), LAMPS_PROBLEM)
        assert AlfworldGame(other).reset()[0].startswith("Candles.")
    # What is damaged, or of another version, is made again.
    for content in (b"", b"junk", cached.read_bytes()[:-20]):
        cached.write_bytes(content)
        interpreted._cache.clear()
        assert AlfworldGame(file).reset() == first
    monkeypatch.setattr(translation, "_FORMAT_VERSION", 10**6)
    interpreted._cache.clear()
    assert AlfworldGame(file).reset() == first
    assert len(list(own_cache.rglob("*.json.z"))) == 2
    changed = write_game(tmp_path / "c", LAMPS_DOMAIN, LAMPS_GRAMMAR, LAMPS_PROBLEM.replace("(broken shed)", ""))
    AlfworldGame(changed)
    assert len(list(own_cache.rglob("*.json.z"))) == 3


def _open(path: str) -> str:
    return AlfworldGame(path).reset()[0]


def test_concurrent_writers_leave_one_whole_file(tmp_path: Path, own_cache: Path) -> None:
    file = str(lamps_game(tmp_path / "lamps"))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(_open, [file] * 8))) == 1
    files = [path for path in own_cache.rglob("*") if path.is_file()]
    assert len(files) == 1
    translation.Translation.from_json(translation.read_cached(files[0]) or b"")


def test_an_unwritable_cache_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    interpreted._cache.clear()
    assert AlfworldGame(lamps_game(tmp_path / "lamps")).reset()[0].startswith("Lamps.")


def test_json_keeps_everything() -> None:
    made = translation.translate(LAMPS_DOMAIN, LAMPS_PROBLEM)
    assert translation.Translation.from_json(made.to_json()) == made
    assert made.axioms and made.operators and any(when for op in made.operators for _, when in op.effects)


def test_translating_leaves_the_process_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    translation.translate(LAMPS_DOMAIN, LAMPS_PROBLEM)
    assert sys.argv == before and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("domain", "grammar", "problem", "reason"),
    [
        (LAMPS_DOMAIN, "{ not a grammar", LAMPS_PROBLEM, "cannot be loaded"),
        ("(define", LAMPS_GRAMMAR, LAMPS_PROBLEM, "cannot be loaded"),
        ("", LAMPS_GRAMMAR, "", "cannot be loaded"),
        (LAMPS_DOMAIN, LAMPS_GRAMMAR.replace("action shout", "action whisper"), LAMPS_PROBLEM, "no action shout"),
        (
            LAMPS_DOMAIN,
            LAMPS_GRAMMAR,
            LAMPS_PROBLEM.replace("(forall (?p - place) (lit ?p))", "(wired shed hall_bar_1)"),
            "goal can never be reached",
        ),
        (LAMPS_DOMAIN, LAMPS_GRAMMAR.replace('"task":', '"tusk":'), LAMPS_PROBLEM, "no rule for #task#"),
        (
            LAMPS_DOMAIN,
            LAMPS_GRAMMAR.replace("Lamps.", "{__import__('os').getcwd()}"),
            LAMPS_PROBLEM,
            r"getcwd\(\). is not supported",
        ),
        (LAMPS_DOMAIN, LAMPS_GRAMMAR.replace("Lamps.", "{a.__class__}"), LAMPS_PROBLEM, "is not supported"),
    ],
)
def test_files_it_cannot_run_are_named(tmp_path: Path, domain: str, grammar: str, problem: str, reason: str) -> None:
    file = write_game(tmp_path / "game", domain, grammar, problem)
    with pytest.raises(UserError, match=reason) as caught:
        AlfworldGame(file).reset()
    assert str(file) in str(caught.value)


def test_damaged_files_are_named(tmp_path: Path, own_cache: Path) -> None:
    """Words of a file changed at random: it plays, or a UserError names it, at loading or later."""
    rng = np.random.default_rng(5)
    ended = {"played": 0, "refused": 0}
    for number in range(160):
        texts = [LAMPS_DOMAIN, LAMPS_GRAMMAR, LAMPS_PROBLEM]
        # The grammar twice as often: most of it is read when a text is made.
        changed = (0, 1, 1, 2)[number % 4]
        words = re.findall(r"\w+|\s+|[^\w\s]", texts[changed])
        for place, other in rng.integers(len(words), size=(rng.integers(1, 4), 2)):
            words[place] = ["", words[other], f"{words[place]} {words[other]}", f"{words[place]}x"][rng.integers(4)]
        texts[changed] = "".join(words)
        file = write_game(tmp_path / str(number), *texts)
        try:
            game = AlfworldGame(file)
            commands = game.reset()[1]["admissible_commands"]
            for _ in range(20):
                if commands:
                    commands = game.step(str(rng.choice(commands)))[3]["admissible_commands"]
            ended["played"] += 1
        except UserError as error:
            assert str(file) in str(error)
            ended["refused"] += 1
    assert ended["played"] > 10 and ended["refused"] > 80


def test_neither_the_library_nor_the_stock_engine_is_loaded(tmp_path: Path) -> None:
    file = lamps_game(tmp_path / "lamps")
    code = (
        "import sys\n"
        "from agent_system.environments.env_package.alfworld import AlfworldGame\n"
        f"game = AlfworldGame({str(file)!r}); game.reset(); game.step('look')\n"
        "assert 'libdownward' not in open('/proc/self/maps').read()\n"
        "assert 'alfworld.agents' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_old_verbs_are_played_as_they_are(small_gamefiles: list[Path], tmp_path: Path) -> None:
    """A game of an older release says `put`; its commands are offered and understood under that name."""
    file = altered_game(small_gamefiles[0], tmp_path)
    plan = json.loads(small_gamefiles[0].read_text(encoding="utf-8"))["walkthrough"]
    game = AlfworldGame(file)
    game.reset()
    for command in plan:
        if command.startswith("move "):
            command = "put " + command[5:].replace(" to ", " in/on ")
        _, _, won, info = game.step(command)
    assert won and info["won"]
