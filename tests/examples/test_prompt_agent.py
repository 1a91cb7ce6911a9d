# SPDX-License-Identifier: Apache-2.0
"""The prompt agent against a chat endpoint on this machine: play, failures, odd answers, resume, overlap, costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_system.environments.env_package.alfworld.game import AlfworldGame
from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from agent_system.environments.env_package.alfworld.oracle import Oracle
from agent_system.environments.env_package.webshop.generate import generate_catalogue
from agent_system.environments.env_package.webshop.tasks import ShopSettings, open_shop
from agent_system.step_discriminator.trajectory_analyzer import analyze
from agent_system.trajectory import SCHEMA_VERSION, Step, Trajectory, load_trajectories, save_trajectories
from examples.prompt_agent.answers import MAX_CHARS
from examples.prompt_agent.client import Endpoint
from examples.prompt_agent.results import EpisodeFile
from examples.prompt_agent.run import main
from tests.helpers.chat_server import (
    ChatServer,
    HttpAnswer,
    completion,
    follows_plans,
    prompt_of,
    said,
    scripted,
    sequence,
    tagged,
)
from verl.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-abcdefghijklmnop"


@pytest.fixture(autouse=True)
def _no_proxy_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never write into it."""
    return generate_games(tmp_path_factory.mktemp("games") / "g", 6, 2, 1, seed=4, max_receptacles=6, max_objects=6)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So small that every search shows all of it. Never write into it."""
    return generate_catalogue(tmp_path_factory.mktemp("shop") / "s", products=9, goals=40, seed=3)


def arguments(server: ChatServer, data: Path, out: Path, *more: str, env: str = "alfworld") -> list[str]:
    return [
        "--env", env, "--base-url", server.base_url, "--model", "m", "--data-dir", str(data), "--out", str(out),
        "--quiet", *more,
    ]  # fmt: skip


def records(path: Path) -> list[Trajectory]:
    episodes, report = load_trajectories(path)
    assert not report.bad
    return episodes


# ---- play


def oracle_plans(games: Path, split: str) -> dict[str, list[str]]:
    played = [AlfworldGame(load_manifest(games, split).gamefile(entry)) for entry in load_manifest(games, split).games]
    plans = {game.task.removeprefix("Your task is to: "): list(Oracle(game)) for game in played}
    assert len(plans) == len(played), "two games with the same text"
    return plans


def test_plays_alfworld_as_in_training_and_credit_analysis_reads_it(
    games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "t.jsonl"
    plans = oracle_plans(games, "train")
    with ChatServer(follows_plans(plans)) as server:
        prices = ("--price-in", "2", "--price-out", "10")
        assert main(arguments(server, games, out, "--episodes", "12", "--group-size", "2", "--seed", "3", *prices)) == 0
        asked = server.requests
        assert set(server.keys) == {None}
    episodes = records(out)
    assert len(episodes) == 12 and all(episode.success and not episode.truncated for episode in episodes)
    assert [episode.uid for episode in episodes[::2]] == [episode.uid for episode in episodes[1::2]]
    assert len({episode.task["gamefile"] for episode in episodes}) == 6
    policy = dict(episodes[0].policy)
    usage = policy.pop("usage")
    sampling = {"temperature": 1.0, "max_tokens": 512}
    assert policy == {"kind": "prompt_agent", "model": "m", "sampling": sampling, "seed": 3}
    steps = len(episodes[0].steps)
    assert usage["requests"] == steps and usage["prompt_tokens"] == 100 * steps and usage["retries"] == 0
    assert episodes[0].steps[0].response == tagged(episodes[0].steps[0].action)
    # The requests: one user message with the manager's prompt, a 32-bit seed of its own, nothing else.
    first = next(request for request in asked if episodes[0].steps[0].observation in prompt_of(request))
    assert set(first) == {"model", "messages", "temperature", "max_tokens", "seed"}
    assert "Actions you can take now" in prompt_of(first)
    seeds = [request["seed"] for request in asked]
    assert len(set(seeds)) == len(seeds) == sum(len(episode.steps) for episode in episodes)
    assert all(0 <= seed < 2**31 for seed in seeds)
    # Costs, in all and per episode.
    summary = json.loads((tmp_path / "deep" / "t.jsonl.summary.json").read_text())
    assert summary["success"]["mean"] == 1.0 and summary["usage"]["requests"] == len(asked)
    assert summary["cost_usd"] == pytest.approx((2 * 100 + 10 * 10) * len(asked) / 1e6)
    assert sum(row["cost_usd"] for row in summary["episodes"]) == pytest.approx(summary["cost_usd"])
    assert sum(row["num_episodes"] for row in summary["success_by_task_type"].values()) == 12
    printed = capsys.readouterr().out
    assert "| all | 12 | 100.0 [" in printed and "US dollars" in printed
    # Stage 1.
    assert analyze.main([str(out), "--out-dir", str(tmp_path), "--data-dir", str(games), "--quiet"]) == 0
    labelled = json.loads((tmp_path / "credit_analysis.json").read_text())["trajectories"]
    assert len(labelled) == 12 and all(record["succeeded"] for record in labelled)


def test_plays_the_shop_and_credit_analysis_reads_it(shop: Path, tmp_path: Path) -> None:
    goals = open_shop(ShopSettings(str(shop))).goals
    plans = {}
    for goal in (goals[index] for index in range(len(goals))):
        wanted = goal.goal_options.values() if isinstance(goal.goal_options, dict) else goal.goal_options
        clicks = [goal.asin.lower(), *(value.rpartition(": ")[2] for value in wanted), "buy now"]
        plans[goal.instruction_text] = [f"search[{goal.name}]", *(f"click[{value}]" for value in clicks)]
    out = tmp_path / "t.jsonl"
    with ChatServer(follows_plans(plans)) as server:
        assert main(arguments(server, shop, out, "--episodes", "6", "--split", "val", env="webshop")) == 0
    episodes = records(out)
    assert {episode.env_name for episode in episodes} == {"webshop"}
    assert all(episode.success for episode in episodes if episode.task["winnable"])
    assert sum(episode.success for episode in episodes) >= 4
    summary = json.loads((tmp_path / "t.jsonl.summary.json").read_text())
    assert summary["split"] == "val" and summary["cost_usd"] is None and summary["mean_task_score"] > 0.5
    assert analyze.main([str(out), "--out-dir", str(tmp_path), "--data-dir", str(shop), "--quiet"]) == 0


def test_the_file_depends_on_the_answers_only(games: Path, tmp_path: Path) -> None:
    """Not on how many episodes run at a time, nor on answers that come late, nor on how the run was cut in two."""

    def late(request: dict[str, Any]) -> HttpAnswer:
        time.sleep(request["seed"] % 4 / 200)
        return scripted(request)

    play = ("--episodes", "8", "--group-size", "2", "env.max_steps=4", "env.history_length=1")
    contents = set()
    for concurrency in (1, 3, 8):
        out = tmp_path / f"{concurrency}.jsonl"
        with ChatServer(late) as server:
            assert main(arguments(server, games, out, *play, "--concurrency", str(concurrency))) == 0
            assert server.most_at_once <= concurrency
        contents.add(out.read_bytes())
    assert len(contents) == 1
    # A longer run starts with the shorter one and asks for the rest only.
    short = tmp_path / "short.jsonl"
    with ChatServer(scripted) as server:
        assert main(arguments(server, games, short, "--episodes", "4", *play[2:])) == 0
        half = len(server.requests)
        assert main(arguments(server, games, short, *play)) == 0
        assert len(server.requests) == 8 * 4 and half == 4 * 4
    assert short.read_bytes() in contents
    episodes = records(short)
    assert all(episode.truncated and len(episode.steps) == 4 for episode in episodes)
    # Members of a group see the same first prompt and still differ.
    assert episodes[0].steps[0].observation == episodes[1].steps[0].observation
    actions = [[step.action for step in episode.steps] for episode in episodes]
    assert any(left != right for left, right in zip(actions[::2], actions[1::2]))


def test_requests_overlap_and_never_exceed_the_limit(games: Path, tmp_path: Path) -> None:
    """The server answers nobody before three are asking."""
    together = threading.Barrier(3, timeout=20)

    def model(request: dict[str, Any]) -> HttpAnswer:
        together.wait()
        return scripted(request)

    with ChatServer(model) as server:
        options = ("--episodes", "6", "--concurrency", "3", "env.max_steps=3")
        assert main(arguments(server, games, tmp_path / "t.jsonl", *options)) == 0
        assert server.most_at_once == 3 and len(server.requests) == 18


# ---- failures


@pytest.mark.parametrize(
    ("status", "key", "words"),
    [
        (401, "", "No key was sent: set OPENAI_API_KEY"),
        (401, KEY, "Check the key in OPENAI_API_KEY"),
        (403, KEY, "Check the key"),
        (404, "", "Check --base-url"),
        (307, "", "Check --base-url"),
        (400, "", "--extra-body"),
        (422, "", "--extra-body"),
    ],
)
def test_a_refusal_is_one_error_and_no_retry(
    status: int, key: str, words: str, games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", f"{key}\n" if key else "")
    body = json.dumps({"error": {"message": f"bad\x1b[2J\nthing: {KEY * 20} {'x' * 400}"}}).encode()
    out = tmp_path / "t.jsonl"
    # Where the prompt may be what is wrong, another one is tried.
    tries = 2 if status in (400, 422) else 1
    with ChatServer(sequence(*[HttpAnswer(body, status)] * tries)) as server:
        assert main(arguments(server, games, out, "--concurrency", "1")) == 2
        assert server.keys == [f"Bearer {key}" if key else None] * tries
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and str(status) in line and "bad [2J thing" in line and words in line
    assert "0 of 50 episodes" in line and "\x1b" not in line and len(line) < 800
    if key:
        assert KEY[:8] not in printed.err + printed.out
    assert not out.exists()


def test_the_key_is_in_no_file_and_no_message(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTHER_KEY", KEY)
    with ChatServer(scripted) as server:
        options = ("--api-key-env", "OTHER_KEY", "--episodes", "2", "env.max_steps=2")
        assert main(arguments(server, games, tmp_path / "t.jsonl", *options)) == 0
        assert set(server.keys) == {f"Bearer {KEY}"}
    printed = capfd.readouterr()
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert KEY not in written + printed.out + printed.err + repr(Endpoint("http://h", "m", api_key=KEY))


# ---- odd answers


def test_odd_answers_are_played_as_nothing_said_and_counted(games: Path, tmp_path: Path) -> None:
    kinds = [
        HttpAnswer(b'{"choices": []}'),
        completion({"content": None}, {"prompt_tokens": 5, "completion_tokens": 0}),
        completion({"content": None, "tool_calls": [{}]}),
        completion({"content": "<action>\u0000\ud800 look</action>" + "<think>" * 20_000}, finish_reason="length"),
        said("\u4f60 <action>look</action>"),
    ]
    out = tmp_path / "t.jsonl"
    with ChatServer(sequence(*kinds)) as server:
        assert main(arguments(server, games, out, "--episodes", "1", "env.max_steps=5")) == 0
    (episode,) = records(out)
    assert [step.is_action_valid for step in episode.steps] == [False] * 5
    assert [len(step.response or "") for step in episode.steps] == [0, 0, 0, MAX_CHARS, 23]
    assert episode.policy["usage"] == {
        "requests": 5, "retries": 0, "prompt_tokens": 105, "completion_tokens": 10, "without_usage": 3,
        "at_token_limit": 1,
        "oddities": {"empty_choices": 1, "null_content": 1, "tool_calls_only": 1, "cut_text": 1},
    }  # fmt: skip
    summary = json.loads((tmp_path / "t.jsonl.summary.json").read_text())
    assert summary["usage"] == episode.policy["usage"] | {"oddities": summary["usage"]["oddities"]}
    assert summary["valid_action_ratio"] == 0.0


@pytest.mark.parametrize("first", [True, False])
def test_a_prompt_that_is_refused_is_played_as_nothing_said(first: bool, games: Path, tmp_path: Path) -> None:
    """A content filter, or a prompt that is too long: only some prompts, even those of the first episode."""
    refused: list[str] = []

    def filtered(request: dict[str, Any]) -> HttpAnswer:
        prompt = prompt_of(request)
        task = next((line for line in prompt.splitlines() if "ask" in line), "")
        if task and not refused and (first or len(server.requests) > 4):
            refused.append(task)
        if task in refused:
            return HttpAnswer(b'{"error": {"message": "content management policy"}}', 400)
        return scripted(request) if task else said("Hello to you.")

    out = tmp_path / "t.jsonl"
    with ChatServer(filtered) as server:
        assert main(arguments(server, games, out, "--episodes", "6", "--concurrency", "1", "env.max_steps=3")) == 0
    counts = [episode.policy["usage"]["oddities"].get("refused_prompt", 0) for episode in records(out)]
    assert len(counts) == 6 and (counts[0] > 0) == first and min(counts) == 0 < max(counts)
    summary = json.loads((tmp_path / "t.jsonl.summary.json").read_text())
    assert summary["usage"]["oddities"]["refused_prompt"] == sum(counts)


# ---- resume


def test_killed_and_continued_equals_uninterrupted(games: Path, tmp_path: Path) -> None:
    play = ("--episodes", "8", "--concurrency", "2", "env.max_steps=3")
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    with ChatServer(scripted) as server:
        assert main(arguments(server, games, whole, *play)) == 0

    many = threading.Semaphore(14)

    def stops(request: dict[str, Any]) -> HttpAnswer:
        """Four to six episodes are over when it falls silent."""
        many.acquire()
        return scripted(request)

    with ChatServer(stops) as server:
        command = [sys.executable, "-m", "examples.prompt_agent.run", *arguments(server, games, cut, *play)]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while not (cut.exists() and cut.read_bytes().count(b"\n") >= 4) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        many.release(1000)
    finished = cut.read_bytes().count(b"\n")
    assert 4 <= finished < 8
    # Killed while it wrote: the beginning of a line.
    with cut.open("ab") as handle:
        handle.write(whole.read_bytes()[:100])
    with ChatServer(scripted) as server:
        assert main(arguments(server, games, cut, *play)) == 0
        assert len(server.requests) == (8 - finished) * 3
        assert main(arguments(server, games, cut, *play)) == 0
        assert len(server.requests) == (8 - finished) * 3
    assert cut.read_bytes() == whole.read_bytes()
    summaries = [path.with_name(f"{path.name}.summary.json").read_bytes() for path in (whole, cut)]
    assert summaries[0] == summaries[1]


def test_what_was_finished_before_an_error_is_kept(
    games: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.jsonl"
    play = ("--episodes", "4", "--concurrency", "1", "--max-retries", "0", "env.max_steps=2")
    left = iter(range(5))

    def fails(request: dict[str, Any]) -> HttpAnswer:
        return HttpAnswer(b"{}", 500) if next(left, None) is None else scripted(request)

    with ChatServer(fails) as server:
        assert main(arguments(server, games, out, *play)) == 2
    assert "2 of 4 episodes are in" in capfd.readouterr().err and len(records(out)) == 2
    with ChatServer(scripted) as server:
        assert main(arguments(server, games, out, *play)) == 0
        assert len(server.requests) == 4


def test_a_file_of_something_else_is_left_alone(games: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.jsonl"
    play = ("--episodes", "1", "env.max_steps=1")

    def refused(*changes: str) -> str:
        before = out.read_bytes()
        with ChatServer(scripted) as server:
            assert main(arguments(server, games, out, *play, *changes)) == 2
            assert server.requests == []
        assert out.read_bytes() == before
        return capfd.readouterr().err

    with ChatServer(scripted) as server:
        assert main(arguments(server, games, out, *play)) == 0
    for change in (
        ["--seed", "1", "--split", "valid_seen"], ["--extra-body", '{"top_p": 0.5}'],
        ["env.max_steps=2", "env.history_length=0"], ["env.alfworld.prompt_style=compact"],
    ):  # fmt: skip
        assert "episodes of another run" in refused(*change)
    (episode,) = records(out)
    right = episode.policy["usage"]
    for usage in (None, {}, right | {"requests": -1}, right | {"oddities": []}, right | {"oddities": {"a": 1.5}}):
        changed = replace(episode, policy={**episode.policy, "usage": usage})
        save_trajectories(out, [changed])
        with pytest.raises(UserError, match=r"no readable policy\.usage"):
            EpisodeFile(out, episode.uid.rpartition("-")[0])
    step = Step(0, "o", ("look",), None, "look", True, 0.0, True, "k")
    save_trajectories(out, [Trajectory(SCHEMA_VERSION, "x", "x", "alfworld", {}, {}, True, 1.0, None, False, (step,))])
    assert "another run (x)" in refused()
    out.write_text("my notes\n")
    assert "no episodes" in refused()


# ---- command line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--episodes", "0"], "--episodes 0"),
        (["--episodes", "5", "--group-size", "2"], "multiple of --group-size"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--max-retries", "-1"], "--max-retries -1"),
        (["--timeout", "0"], "--timeout 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--price-in", "1"], "both or none"),
        (["--price-in", "-1", "--price-out", "1"], "--price-in -1"),
        (["--split", "val"], "alfworld has train, valid_seen, valid_unseen"),
        (["--extra-body", "{"], "--extra-body: not JSON"),
        (["--extra-body", '{"a": NaN}'], "--extra-body: not JSON"),
        (["--extra-body", '{"stream": true}'], "without messages, model, n, stream"),
        (["--base-url", "localhost:8000"], "--base-url: not an address"),
        (["--base-url", "http://user:secret@host/v1"], "environment variable"),
        (["--base-url", "http://host:port/v1"], "--base-url: not an address"),
        (["--base-url", "https://host/v1?key=secret"], "environment variable"),
        (["trainer.total_epochs=3"], "only keys of the environment"),
        (["env.seed=3"], "--seed"),
        (["env.max_step=3"], "env.max_steps"),
        (["word"], "only keys of the environment"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence(
    options: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.jsonl"
    command = ["--env", "alfworld", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--out", str(out)]
    assert main([*command, *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line and "secret" not in line
    assert not out.exists()


def test_ctrl_c_keeps_what_is_finished(games: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.jsonl"

    def model(request: dict[str, Any]) -> HttpAnswer:
        if out.exists():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return scripted(request)

    with ChatServer(model) as server:
        assert main(arguments(server, games, out, "--concurrency", "1", "env.max_steps=2")) == 130
    assert len(records(out)) == 1
    assert "the same command goes on" in capfd.readouterr().err


@pytest.mark.parametrize("env", ["alfworld", "webshop"])
def test_scripts_pass_model_options_and_overrides_on(env: str, tmp_path: Path) -> None:
    echo = tmp_path / "python"
    echo.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    echo.chmod(0o755)
    script = ROOT / f"examples/prompt_agent/run_{env}.sh"

    def run(*words: str) -> str:
        variables = {**os.environ, "PYTHON": str(echo), "OPENAI_BASE_URL": "https://h/v1"}
        done = subprocess.run(["bash", str(script), *words], capture_output=True, text=True, check=True, env=variables)
        return done.stdout

    _, module, *words = run("some/model", "--episodes", "3", "env.max_steps=2").splitlines()
    assert module == "examples.prompt_agent.run"
    assert words[words.index("--env") + 1] == env and words[words.index("--model") + 1] == "some/model"
    assert words[words.index("--base-url") + 1] == "https://h/v1"
    assert words[-3:] == ["--episodes", "3", "env.max_steps=2"]
    assert f"bash examples/prompt_agent/run_{env}.sh [MODEL]" in run("--help")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from examples.prompt_agent.run import build_parser; build_parser().format_help(); "
        "print(sorted({'torch', 'ray', 'transformers', 'hydra', 'httpx', 'alfworld'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
