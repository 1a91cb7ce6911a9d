# SPDX-License-Identifier: Apache-2.0
"""Stage 1 on ALFWorld games: generated ones, and the real one of the shared folder where it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from agent_system.step_discriminator.trajectory_analyzer import (
    CreditOptions,
    Replayer,
    analyze,
    collect,
    get_adapter,
    label_trajectories,
    load_credit_analysis,
    report,
)
from agent_system.step_discriminator.trajectory_analyzer.episodes import Choice, EpisodeIdentity, play
from agent_system.step_discriminator.trajectory_analyzer.expert_sources import AlfworldExperts, ExpertTask
from agent_system.step_discriminator.trajectory_analyzer.replay import replay_naively
from agent_system.trajectory import load_trajectories, save_trajectories
from verl.utils.errors import UserError

pytest.importorskip("alfworld", reason="games are generated from alfworld's tables")

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared" / "data" / "alfworld"
REAL = "json_2.1.1/train/pick_heat_then_place_in_recep-Potato-None-SinkBasin-14"
SCRIPT = ROOT / "agent_system/step_discriminator/trajectory_analyzer/run_credit_analysis_alfworld.sh"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    from agent_system.environments.env_package.alfworld.generate import generate_games

    return generate_games(tmp_path_factory.mktemp("games") / "data", train=12, valid_seen=0, valid_unseen=0, seed=3)


@pytest.fixture(scope="module")
def explorer_trajectories(data_dir):
    options = collect.CollectOptions(detour_rate=0.4, error_rate=0.1, seed=1)
    return collect.collect(AlfworldExperts(data_dir), "train", 24, options)


def real_trajectory(detour_rate: float, seed: int):
    """An explorer's episode of the real game."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there")
    gamefile = next((SHARED / REAL).glob("*/game.tw-pddl")).relative_to(SHARED).as_posix()
    job = collect.EpisodeJob(ExpertTask(gamefile, {"gamefile": gamefile}), 0)
    source = AlfworldExperts(SHARED)
    return collect.play_episode(job, source, collect.CollectOptions(detour_rate=detour_rate, seed=seed, max_steps=200))


def naive_labels(game, actions):
    """(success, steps) of every deletion, each replayed from the start."""
    return [replay_naively(game, actions[:i] + actions[i + 1 :]) for i in range(len(actions))]


def check(record, game, actions) -> None:
    cut = actions[: record.num_steps]
    assert replay_naively(game, actions) == (True, len(cut))
    expected = naive_labels(game, cut)
    assert [(step.ablated_success, step.ablated_steps) for step in record.steps] == expected
    assert [step.credit for step in record.steps] == [int(not success) for success, _ in expected]


def test_explorer_labels_equal_naive_replay(data_dir, explorer_trajectories):
    adapter = get_adapter("alfworld/AlfredTWEnv", data_dir)
    factory = adapter.make_game
    records = label_trajectories(explorer_trajectories, adapter, options=CreditOptions())
    won = [(t, r) for t, r in zip(explorer_trajectories, records) if t.success]
    assert len(won) >= 18
    for trajectory, record in won:
        assert record.status == "labelled"
        check(record, factory(trajectory.task), [step.action for step in trajectory.steps])
        assert record.steps[-1].credit == 1
        kept = [trajectory.steps[index].action for index in record.evolved_indices]
        assert replay_naively(factory(trajectory.task), kept) == (True, len(kept))
        assert record.env_steps_used < record.env_steps_naive
    kinds = {kind for _, record in won for kind, count in record.kinds().items() if count}
    assert {"exploration", "no_effect", "undone"} <= kinds


def test_minimal_successes_cannot_be_shortened_by_hand(data_dir, explorer_trajectories):
    """No step and no pair of steps can go, tried by naive replay; the evolved length is at most the single-step one."""
    adapter = get_adapter("alfworld", data_dir)
    won = [item for item in explorer_trajectories if item.success][:8]
    single = label_trajectories(won, adapter, options=CreditOptions())
    minimal = label_trajectories(won, adapter, options=CreditOptions(mode="minimal", label_source="minimal"))
    for trajectory, ours, shorter in zip(won, single, minimal):
        assert [step.necessary_single for step in ours.steps] == [step.necessary_single for step in shorter.steps]
        assert [index for index, step in enumerate(shorter.steps) if step.credit] == list(shorter.evolved_indices)
        assert len(shorter.evolved_indices) <= len(ours.evolved_indices) <= ours.num_steps - (ours.num_redundant > 0)
        kept = [trajectory.steps[index].action for index in shorter.evolved_indices]
        game = adapter.make_game(trajectory.task)
        assert replay_naively(game, kept) == (True, len(kept))
        for removed in [*((i,) for i in range(len(kept))), *combinations(range(len(kept)), 2)]:
            assert not replay_naively(game, [a for i, a in enumerate(kept) if i not in removed])[0]


def test_state_id_separates_what_state_key_separates(data_dir):
    """Over random walks that come back to old states by other ways."""
    from agent_system.environments.env_package.alfworld import AlfworldGame, load_manifest

    rng = np.random.default_rng(0)
    for entry in load_manifest(data_dir, "train").games[:4]:
        game = AlfworldGame(data_dir / entry.path)
        pairs = set()
        for _ in range(4):
            _, info = game.reset()
            for _ in range(60):
                pairs.add((game.state_key, game.state_id))
                commands = [c for c in info["admissible_commands"] if not c.startswith("go to") or rng.random() < 0.2]
                info = game.step(commands[int(rng.integers(len(commands)))])[3]
        assert len({key for key, _ in pairs}) == len({identity for _, identity in pairs}) == len(pairs) > 20


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_over_all_games_equal_naive_replay(data_dir, seed):
    """Random admissible (and a few impossible) commands between those of a plan: every deletion, also of failures."""
    from agent_system.environments.env_package.alfworld import load_manifest
    from agent_system.environments.env_package.alfworld.experts import Oracle

    rng = np.random.default_rng(seed)
    won = 0
    for entry in load_manifest(data_dir, "train").games:
        game = get_adapter("alfworld", data_dir).make_game({"gamefile": entry.path, "sha256": entry.sha256})
        game.reset()
        plan = list(Oracle(game))

        def act(observation, info, plan=plan):
            if plan and rng.random() < 0.5:
                return Choice(plan.pop(0))
            commands = [*info["admissible_commands"], "take sun 1 from sky 1"]
            if rng.random() < 0.8:  # moving away spoils most plans
                commands = [command for command in commands if not command.startswith("go to")]
            return Choice(commands[int(rng.integers(len(commands)))])

        identity = EpisodeIdentity(entry.path, entry.path, "alfworld", {"gamefile": entry.path}, {})
        trajectory = play(game, act, identity, 40)
        won += trajectory.success
        replayer = Replayer(game, [step.action for step in trajectory.steps])
        assert replayer.original.success == trajectory.success
        actions = list(replayer.original.actions)
        ablations = [replayer.without((index,)) for index in range(len(actions))]
        assert [(item.success, item.steps) for item in ablations] == naive_labels(game, actions)
        assert replayer.env_steps_used <= replayer.env_steps_naive
    assert 0 < won < 12


def test_real_game_labels_equal_naive_replay():
    trajectory = real_trajectory(0.4, 0)
    assert trajectory.success and any(step.expert_kind == "detour" for step in trajectory.steps)
    adapter = get_adapter("alfworld", SHARED)
    record = label_trajectories([trajectory], adapter)[0]
    assert 0 < record.num_redundant < record.num_steps
    check(record, adapter.make_game(trajectory.task), [step.action for step in trajectory.steps])


class StockGame:
    """The installed engine itself, for naive replay."""

    def __init__(self, gamefile: Path) -> None:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
        from textworld.core import EnvInfos
        from textworld.envs.pddl import PddlEnv

        self._env = AlfredInfos(AlfredDemangler(PddlEnv(EnvInfos(won=True, extras=["gamefile"])), shuffle=False))
        self._env.load(str(gamefile))

    def reset(self):
        state = self._env.reset()
        return state.feedback, {"won": bool(state["won"])}

    def step(self, action):
        state, _, _ = self._env.step(action)
        return state.feedback, 0.0, False, {"won": bool(state["won"])}


@pytest.mark.slow
def test_real_game_labels_equal_naive_replay_on_the_stock_engine(monkeypatch):
    pytest.importorskip("textworld")
    # The translator overwrites sys.argv.
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    episodes = [real_trajectory(0.4, seed) for seed in range(30)]
    trajectory = min(
        (item for item in episodes if item.success and any(step.expert_kind == "detour" for step in item.steps)),
        key=lambda item: len(item.steps),
    )
    record = label_trajectories([trajectory], get_adapter("alfworld", SHARED))[0]
    assert record.num_redundant > 0
    actions = [step.action for step in trajectory.steps]
    check(record, StockGame(SHARED / trajectory.task["gamefile"]), actions)


def test_collecting_does_not_depend_on_workers_and_seeds_differ(data_dir, explorer_trajectories, ray_session):
    options = collect.CollectOptions(detour_rate=0.4, error_rate=0.1, seed=1)
    again = collect.collect(AlfworldExperts(data_dir), "train", 24, options, workers=2)
    assert [item.to_line() for item in again] == [item.to_line() for item in explorer_trajectories]
    other = collect.collect(AlfworldExperts(data_dir), "train", 12, collect.CollectOptions(detour_rate=0.4, seed=2))
    actions = [[[step.action for step in item.steps] for item in group] for group in (again[:12], other)]
    assert actions[0] != actions[1]


def test_collected_records_are_whole(data_dir, explorer_trajectories, tmp_path):
    save_trajectories(tmp_path / "t.jsonl", explorer_trajectories)
    loaded, report = load_trajectories(tmp_path / "t.jsonl")
    assert loaded == explorer_trajectories and report.bad == []
    assert len({item.traj_uid for item in loaded}) == 24 and len({item.uid for item in loaded}) == 12
    item = loaded[0]
    assert not Path(item.task["gamefile"]).is_absolute() and (data_dir / item.task["gamefile"]).is_file()
    assert item.task["instruction"].startswith("Your task is to: ") and len(item.task["sha256"]) == 64
    assert {step.expert_kind for t in loaded for step in t.steps} == {"plan", "detour", "mistake"}
    assert sum(step.reward for step in item.steps) == item.episode_reward
    for step in item.steps:
        assert step.response.endswith(f"<action>{step.action}</action>")
        if step.expert_kind != "mistake":
            assert step.action in step.admissible_actions


def test_rates_are_checked(data_dir):
    with pytest.raises(UserError, match=r"--detour-rate 1\.5"):
        collect.collect(AlfworldExperts(data_dir), "train", 1, collect.CollectOptions(detour_rate=1.5))


def test_missing_and_changed_games_have_clear_messages(data_dir, explorer_trajectories, tmp_path, capsys):
    won = [item for item in explorer_trajectories if item.success][:3]
    lines = [item.to_dict() for item in won]
    lines[0]["task"]["gamefile"] = "json_2.1.1/train/gone/trial/game.tw-pddl"
    lines[1]["task"]["sha256"] = "0" * 64
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [str(path), "--data-dir", str(data_dir), "--out-dir", str(tmp_path / "out"), "--quiet"]
    assert analyze.main(arguments) == 1
    excluded = load_credit_analysis(tmp_path / "out" / analyze.ANALYSIS_FILE)["excluded"]
    assert [item["status"] for item in excluded] == ["unreadable_game"] * 2
    assert "gone/trial/game.tw-pddl does not exist" in excluded[0]["reason"] and "--data-dir" in excluded[0]["reason"]
    assert "sha256" in excluded[1]["reason"]
    arguments[2] = str(tmp_path / "nowhere")
    assert analyze.main([*arguments[:4], str(tmp_path / "out2"), "--quiet"]) == 2
    assert "nowhere" in capsys.readouterr().err and not list((tmp_path / "out2").iterdir())


def test_unreadable_game_file_is_reported(data_dir, explorer_trajectories, tmp_path):
    trajectory = next(item for item in explorer_trajectories if item.success)
    game = tmp_path / trajectory.task["gamefile"]
    game.parent.mkdir(parents=True)
    game.write_text('{"pddl_domain": "cut sh')
    trajectory.task.update(sha256=None)
    record = label_trajectories([trajectory], get_adapter("alfworld", tmp_path))[0]
    assert record.status == "unreadable_game" and str(game) in record.reason


def test_script_collects_analyses_and_reports(tmp_path):
    """From another folder, with generated games; a second run over the trajectories gives the same analysis."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    done = run("GENERATE=6", "DATA_DIR=games", "NUM=8", "OUT_DIR=out one", "DETOUR_RATE=0.4")
    assert done.returncode == 0, done.stderr
    assert "task type" in done.stdout and "exploration" in done.stdout
    out = tmp_path / "out one"
    names = {"trajectories.jsonl", analyze.ANALYSIS_FILE, analyze.SUMMARY_FILE, analyze.TIMING_FILE}
    names |= {report.REPORT_FILE, report.PLOT_FILE}
    assert {path.name for path in out.iterdir()} == names
    (tmp_path / "t.jsonl").write_bytes((out / "trajectories.jsonl").read_bytes())
    again = run("TRAJECTORIES=t.jsonl", "DATA_DIR=games", "OUT_DIR=two")
    assert again.returncode == 0, again.stderr
    assert (out / analyze.ANALYSIS_FILE).read_bytes() == (tmp_path / "two" / analyze.ANALYSIS_FILE).read_bytes()
    assert run("-h").stdout.startswith("Stage 1 on ALFWorld") and run("NUMBER=3").returncode == 2
    missing = run("DATA_DIR=nothing")
    assert missing.returncode == 2 and "nothing" in missing.stderr and "Traceback" not in missing.stderr
