# SPDX-License-Identifier: Apache-2.0
"""All command-line programs: bad outputs, bad numbers, odd file contents end in one line and status 2."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_system.environments.env_package.alfworld import generate_games
from agent_system.programs import check_output, run_program
from agent_system.step_discriminator.discriminator_trainer import evaluate, finish, prepare
from agent_system.step_discriminator.trajectory_analyzer import analyze, collect, importers, report
from agent_system.step_discriminator.trajectory_analyzer.document import load_credit_analysis
from agent_system.step_discriminator.trajectory_analyzer.foreign_logs import read_foreign_log
from agent_system.trajectory import load_trajectories, save_trajectories
from tests.agent_system.step_discriminator.discriminator_data import learnable_episodes, make_trajectory, write_credit
from verl.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "agent_system/step_discriminator/discriminator_trainer/run_training_alfworld.sh"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("error: "), err
    return err


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a readable input of every kind, and the file `taken`, where outputs cannot go."""
    trajectories, credits = learnable_episodes(3)
    write_credit(tmp_path / "credit.json", trajectories, credits)
    save_trajectories(tmp_path / "t.jsonl", trajectories)
    (tmp_path / "log.json").write_text("[]")
    (tmp_path / "taken").write_text("something of the user's")
    checkpoint = tmp_path / "sft" / "global_step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    return tmp_path


Program = tuple[Callable[[list[str]], int], list[str]]


def programs(files: Path, out: Path) -> dict[str, Program]:
    """Each program with inputs that it would take and the output `out`."""
    file, folder = str(out), str(out)
    return {
        "collect": (collect.main, ["--out", file, "--data-dir", str(files), "--quiet"]),
        "analyze": (analyze.main, [f"{files}/t.jsonl", "--out-dir", folder, "--quiet"]),
        "report": (report.main, [f"{files}/credit.json", "--out", file]),
        "importers": (importers.main, [f"{files}/log.json", "--format", "sharegpt", "--out", file]),
        "generate_games": (generate_games.main, ["--out", folder, "--train", "1"]),
        "prepare": (prepare.main, [f"{files}/credit.json", "--model", str(files), "--out", folder]),
        "finish": (finish.main, ["--sft", f"{files}/sft", "--max-length", "500", "--out", folder]),
        "evaluate": (evaluate.main, ["--model", str(files), "--data", str(files), "--report", f"{file}/x"]),
    }


NAMES = sorted(programs(Path(), Path()))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_below_a_file_are_refused_first(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, arguments = programs(files, files / "taken" / "below")[name]
    before = sorted(files.rglob("*"))
    assert program(arguments) == 2
    assert "taken is a file" in one_line(capsys)
    assert sorted(files.rglob("*")) == before and (files / "taken").read_text() == "something of the user's"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "evaluate"])  # its --report is a prefix
def test_a_file_in_a_folders_place_and_the_reverse(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wants_file = name in ("collect", "report", "importers")
    program, arguments = programs(files, files / ("sft" if wants_file else "taken"))[name]
    assert program(arguments) == 2
    assert ("is a folder" if wants_file else "is a file") in one_line(capsys)
    assert (files / "taken").read_text() == "something of the user's"


@pytest.mark.parametrize("out", [".", "../here", "{}"])
def test_games_are_not_made_in_the_folder_one_is_in(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert generate_games.main(["--out", out.format(here), "--train", "1"]) == 2
    assert "the folder you are in" in one_line(capsys)


def test_run_program(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> Callable[[], int]:
        def body() -> int:
            raise error

        return body

    assert run_program(lambda: 1) == 1
    assert run_program(fail(PermissionError(errno.EACCES, "Permission denied", "/x/y"))) == 2
    assert one_line(capsys) == "error: /x/y: Permission denied\n"
    assert run_program(fail(UserError("two\nlines"))) == 2
    assert one_line(capsys) == "error: two lines\n"
    assert run_program(fail(KeyError("k")), also=(KeyError,)) == 2
    one_line(capsys)
    with pytest.raises(KeyError):
        run_program(fail(KeyError("a bug")))
    assert run_program(fail(KeyboardInterrupt()), on_interrupt="go on with x") == 130
    assert capsys.readouterr().err == "interrupted; go on with x\n"


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(UserError, match="not allowed"):
        check_output(tmp_path / "a" / "b.json", "--out")
    assert check_output("~/x", "--out") == Path.home() / "x"


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", "-1"], ["--num", "0"], ["--max-steps", "0"], ["--workers", "-1"], ["--detour-rate", "nan"],
        ["--detour-rate", "0.6", "--error-rate", "0.5"], ["--error-rate", "-0.1"], ["--generate", "-1"],
        ["--split", "test"], ["--split", "test", "--generate", "3"],
    ],
)  # fmt: skip
def test_numbers_of_collect(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path / "t.jsonl"), "--data-dir", str(tmp_path / "games"), "--quiet", *options]
    assert collect.main(arguments) == 2
    assert options[0].lstrip("-").replace("generate", "train").split("-")[0] in one_line(capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [["--threshold", "1.5"], ["--threshold", "nan"], ["--max-length", "0"]])
def test_numbers_of_finish(options: list[str], files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finish.main(["--sft", f"{files}/sft", "--out", f"{files}/model", "--max-length", "500", *options]) == 2
    assert options[0] in one_line(capsys) and not (files / "model").exists()


@pytest.mark.parametrize("variable", ["NPROC=two", "NPROC=0", "NPROC=-1", "BALANCE=yes"])
def test_numbers_of_the_training_script(variable: str, files: Path) -> None:
    command = ["bash", str(TRAINING), variable, "OUT_DIR=out", "credit.json"]
    done = subprocess.run(command, cwd=files, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and variable.split("=")[0] in done.stderr and not (files / "out").exists()


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "header.counts is missing": lambda d: d["header"].pop("counts"),
    "header.counts.failed": lambda d: d["header"]["counts"].update(failed="2"),
    "header.replays": lambda d: d["header"].pop("replays"),
    "trajectories is not a list": lambda d: d.update(trajectories={}),
    "excluded is not a list": lambda d: d.pop("excluded"),
    r"trajectories\[1\] is not an object": lambda d: d["trajectories"].__setitem__(1, 7),
    r"trajectories\[0\].succeeded": lambda d: d["trajectories"][0].update(succeeded=None),
    r"trajectories\[0\].redundancy ": lambda d: d["trajectories"][0].update(redundancy=None),
    r"trajectories\[0\].redundancy_kinds": lambda d: d["trajectories"][0].update(redundancy_kinds={"other": 1}),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_analyses_are_named(message: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files / "credit.json"
    document = load_credit_analysis(path)
    DAMAGE[message](document)
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=f"credit.json is damaged: {message}"):
        load_credit_analysis(path)
    for program, arguments in (programs(files, files / "out")[name] for name in ("report", "prepare")):
        program(arguments)
        one_line(capsys)
    assert not (files / "out").exists()


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{", "7", '{"header": []}', "\ufeff{}", "null", "\x00"])
def test_what_is_no_analysis(text: str, tmp_path: Path) -> None:
    path = tmp_path / "credit.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"credit.json is not a credit analysis"):
        load_credit_analysis(path)


def test_what_was_read_can_be_written_again(tmp_path: Path) -> None:
    """What could not be written again is refused wherever it stands, also in the free parts of a record."""
    good = make_trajectory(["look", "go"]).to_dict()
    lines = []
    for place in ("task", "policy"):
        for number in ("1e999", "-1e999", "NaN", "Infinity"):
            lines.append(json.dumps(good | {place: {"x": "HERE"}}).replace('"HERE"', number))
        for depth in (100, 400, 5000):
            lines.append(json.dumps(good | {place: {"x": "HERE"}}).replace('"HERE"', "[" * depth + "]" * depth))
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([*lines, json.dumps(good | {"task": {"x": 1e300}})]) + "\n")
    loaded, found = load_trajectories(path)
    assert [bad.line for bad in found.bad] == list(range(1, len(lines) + 1)) and len(loaded) == 1
    save_trajectories(tmp_path / "again.jsonl", loaded)
    assert load_trajectories(tmp_path / "again.jsonl")[0] == loaded


SEPARATORS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e"


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_model_text_may_hold_any_line_separator(tmp_path: Path, ascii_only: bool, bom: str, end: str) -> None:
    opening = "You are in the middle of a room. You see a shelf 1.\n\nYour task is to: look."
    prompt = f"What you see now: {opening}\nActions you can take now: ['look']"
    response = f"<think>{SEPARATORS}</think><action>look</action>"
    turns = [{"from": "human", "value": opening}, {"from": "gpt", "value": f"Thought: {SEPARATORS} Action: look"}]
    for name, item in (
        ("verl-agent", {"input": prompt, "output": response}),
        ("sharegpt", {"conversations": turns}),
    ):
        text = bom + (json.dumps(item, ensure_ascii=ascii_only) + end) * 2
        (tmp_path / "log.jsonl").write_bytes(text.encode())
        found, problems = read_foreign_log(tmp_path / "log.jsonl", name)
        assert not problems and len(found) == 2 and SEPARATORS in found[0].responses[0]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_deep_logs_are_no_crash(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.json").write_text(text)
    arguments = [f"{tmp_path}/log.json", "--format", "sharegpt", "--out", f"{tmp_path}/t.jsonl"]
    assert importers.main(arguments) == 2
    assert "log.json" in one_line(capsys)


def test_an_analysis_without_a_success_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_trajectories(tmp_path / "t.jsonl", [make_trajectory(["look"], success=False)])
    assert analyze.main([f"{tmp_path}/t.jsonl", "--out-dir", f"{tmp_path}/out", "--quiet"]) == 0
    assert "nothing was labelled" in capsys.readouterr().err
    assert report.main([f"{tmp_path}/out/credit_analysis.json"]) == 0
    assert "no success was labelled" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_is_one_line_and_leaves_nothing(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the user interrupts: here at the first check of the output or of the run."""

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    program, arguments = programs(files, files / "out")[name]
    module = sys.modules[program.__module__]
    monkeypatch.setattr("agent_system.programs.check_output", interrupt)
    if hasattr(module, "check_output"):
        monkeypatch.setattr(module, "check_output", interrupt)
    assert program(arguments) == 130
    assert capsys.readouterr().err.startswith("interrupted; ") and not (files / "out").exists()
