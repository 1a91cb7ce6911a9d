# SPDX-License-Identifier: Apache-2.0
"""Playing in a terminal: commands, undo, hints, completion, piped input; and the list of games."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_system.environments.env_package.alfworld import AlfworldGame, list_games
from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.environments.env_package.alfworld.play import Session, main

REPO_ROOT = Path(__file__).resolve().parents[3]


def _command(session: Session, start: str) -> str:
    return next(word for word in session.completions(start) if word.startswith(start))


def test_hints_lead_to_the_win_even_after_other_commands(small_gamefiles: list[Path]) -> None:
    for file in small_gamefiles[:12]:
        session = Session(AlfworldGame(file), seed=1)
        for number in range(60):
            if number % 4 == 1:
                session.answer(_command(session, "go to "))
            hint = session.answer("hint")
            assert hint is not None and hint.startswith("Hint: ")
            command = hint.removeprefix("Hint: ").split(" (")[0]
            assert command in session.completions("")
            if "*** Won in" in (session.answer(command) or ""):
                break
        else:
            pytest.fail(f"{file}: 60 hints do not win")
        assert session.answer("hint") == "Hint: the game is won."


def test_undo_takes_back_one_command_after_the_other(small_gamefiles: list[Path]) -> None:
    game = AlfworldGame(small_gamefiles[0])
    session = Session(game)
    seen = []
    for _ in range(8):
        seen.append((game.state_key, session.observation, session.completions("")))
        hint = session.answer("hint") or ""
        session.answer(hint.removeprefix("Hint: ").split(" (")[0])
        if game.step("nothing")[2]:
            break
    for expected in reversed(seen):
        assert (session.answer("undo") or "").startswith("Taken back: ")
        assert (game.state_key, session.observation, session.completions("")) == expected
    assert session.answer("undo") == "There is nothing to take back."


def test_what_can_be_typed(small_gamefiles: list[Path]) -> None:
    session = Session(AlfworldGame(small_gamefiles[0]))
    first = _command(session, "go to ")
    assert session.completions("GO TO ") == session.completions("go to ") != []
    assert "undo" in session.completions("u")
    listed = (session.answer("list") or "").splitlines()
    assert listed[0] == f"   1 {first}"
    assert (session.answer("1") or "").startswith(f"You arrive at {first[6:]}.")
    session.answer("restart")
    assert (session.answer(f"  {first.upper()}  ") or "").startswith("You arrive at")
    assert "Perhaps: inventory." in (session.answer("inv") or "")
    assert session.answer("fly away") == "Nothing happens. Type list for what works."
    for nothing in ("0", "-1", "99999", "9" * 5000, "\u0663", "\ud800", "look\x00", "x" * 100_000):
        assert session.answer(nothing) == session.answer("xyz")
    assert session.answer("") == "" and "undo" in (session.answer("?") or "")
    assert session.answer("quit") is None


def test_piped_input(small_gamefiles: list[Path]) -> None:
    for more in ("", "quit\nlook\n"):
        done = subprocess.run(
            [sys.executable, "-m", "agent_system.environments.env_package.alfworld.play", str(small_gamefiles[0])],
            input=f"look\nhint\nundo\ninventory\n{more}",
            capture_output=True,
            text=True,
            cwd=REPO_ROOT,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        texts = ["Your task is to: ", "\n> look\n", "Hint: ", "Taken back: look.", "You are not carrying anything."]
        places = [done.stdout.find(text) for text in texts]
        assert places == sorted(places) and places[0] >= 0
    assert done.stdout.endswith("> quit\n")


def test_bytes_that_are_no_text_end_no_game(small_gamefiles: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent_system.environments.env_package.alfworld.play", str(small_gamefiles[0])],
        input=b"\xff\xfe\nl\xc3\xb6ok\n\x00\ninventory\n",
        capture_output=True,
        cwd=REPO_ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"Nothing happens.") == 3 and b"You are not carrying anything." in done.stdout


def test_a_game_is_drawn_by_seed(
    small_games_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("look\n"))
        assert main(arguments) == status
        out, error = capsys.readouterr()
        return error if status else out.splitlines()[0]

    data = str(small_games_dir)
    first = opened("--data-dir", data, "--seed", "1")
    assert first == opened("--data-dir", data, "--seed", "1")
    monkeypatch.setenv("ALFWORLD_DATA", data)
    assert first == opened("--seed", "1")
    assert len({opened(data, "--seed", str(seed)) for seed in range(6)}) > 1
    assert "/valid_unseen/" in opened("--data-dir", data, "--split", "valid_unseen")
    # Without any data, a few games are generated.
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert opened().startswith(str(tmp_path / "trajevolve"))
    error = opened(str(tmp_path / "missing.tw-pddl"), status=2)
    assert error.startswith("error: ") and error.count("\n") == 1
    (tmp_path / "empty").mkdir()
    assert "no game.tw-pddl" in opened(str(tmp_path / "empty"), status=2)
    assert "ALFWORLD_DATA" in opened("--data-dir", str(tmp_path / "none"), status=2)
    assert opened("--seed", "-1", status=2).startswith("error: --seed -1")


def test_list_of_games(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = generate_games(tmp_path / "games", 7, 0, 2, seed=4)
    game = next(folder.glob("json_2.1.1/train/*/*/game.tw-pddl"))
    game.unlink()
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    assert list_games.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(folder)
    assert lines[1].startswith("train: 6 games (the full release has 3,553), left out: 1 no game file, hash ")
    assert any(line.startswith("valid_unseen: 2 games") for line in lines)
    assert list_games.main(["--data-dir", str(tmp_path / "none")]) == 2
    assert "ALFWORLD_DATA" in capsys.readouterr().err
