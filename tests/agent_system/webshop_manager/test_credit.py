# SPDX-License-Identifier: Apache-2.0
"""Stages 1 and 2 on a generated shop: exact labels, thresholds, speed, and data split by product."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agent_system.step_discriminator.discriminator_trainer.prepare import prepare
from agent_system.step_discriminator.step_prompt import EpisodeText
from agent_system.step_discriminator.trajectory_analyzer import (
    CreditOptions,
    get_adapter,
    label_trajectories,
    load_credit_analysis,
)
from agent_system.step_discriminator.trajectory_analyzer.analyze import analyze
from agent_system.step_discriminator.trajectory_analyzer.collect import CollectOptions, collect
from agent_system.step_discriminator.trajectory_analyzer.expert_sources import WebshopExperts, expert_source
from agent_system.step_discriminator.trajectory_analyzer.replay import replay_naively
from agent_system.trajectory import Trajectory, load_trajectories, save_trajectories
from tests.helpers.tiny import make_tiny_tokenizer
from verl.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = CollectOptions(detour_rate=0.3, error_rate=0.1, seed=1)


@pytest.fixture(scope="module")
def episodes(shop_dir: Path) -> list[Trajectory]:
    return collect(WebshopExperts(shop_dir), "train", 100, OPTIONS)


def actions_of(trajectory: Trajectory) -> list[str]:
    return [step.action for step in trajectory.steps]


def test_the_explorer_wins_wanders_and_errs(episodes: list[Trajectory], shop_dir: Path) -> None:
    assert sum(item.success for item in episodes) >= 70
    kinds = Counter(step.expert_kind for item in episodes for step in item.steps)
    assert kinds["detour"] > 50 and kinds["mistake"] > 20
    for item in episodes:
        assert item.env_name == "webshop" and item.task["instruction"] not in item.steps[0].observation
        assert item.success == (item.task_score == 1.0) and item.episode_reward == 10.0 * item.success
        assert len(item.steps) <= 15
    assert collect(WebshopExperts(shop_dir), "train", 5, OPTIONS) == episodes[:5]
    held_out = {item.task["goal_asin"] for item in collect(WebshopExperts(shop_dir), "val", 30, OPTIONS)}
    assert not held_out & {item.task["goal_asin"] for item in episodes}


def test_labels_equal_naive_replay_and_a_hundred_episodes_take_no_minute(
    episodes: list[Trajectory], shop_dir: Path
) -> None:
    adapter = get_adapter("Webshop", shop_dir)
    started = time.monotonic()
    records = label_trajectories(episodes, adapter, options=CreditOptions())
    assert time.monotonic() - started < 60
    kinds: Counter[str] = Counter()
    for trajectory, record in zip(episodes, records, strict=True):
        assert record.status == ("labelled" if trajectory.success else "failed")
        actions, game = actions_of(trajectory), adapter.make_game(trajectory.task)
        naive = [replay_naively(game, actions[:i] + actions[i + 1 :], adapter.score) for i in range(len(actions))]
        if trajectory.success:
            assert [(step.ablated_success, step.ablated_steps) for step in record.steps] == naive
            kept = [actions[index] for index in record.evolved_indices or ()]
            assert replay_naively(game, kept, adapter.score)[0]
        kinds.update({kind: count for kind, count in record.kinds().items() if count})
    assert {"exploration", "no_effect", "undone"} <= set(kinds)


def test_below_the_threshold_redundant_means_that_the_score_does_not_fall(
    episodes: list[Trajectory], shop_dir: Path
) -> None:
    """Half successes: episodes in which one option was not chosen before buying."""
    adapter = get_adapter("webshop", shop_dir)
    partial = []
    for item in episodes:
        picks = [i for i, step in enumerate(item.steps) if (step.response or "").startswith("<think>pick")]
        if not item.success or not picks:
            continue
        kept = [step for i, step in enumerate(item.steps) if i != picks[-1]]
        game = adapter.make_game(item.task)
        game.reset()
        score = [float(game.step(step.action)[3]["task_score"]) for step in kept][-1]
        if 0.5 <= score < 1.0:
            steps = tuple(replace(step, step_index=i) for i, step in enumerate(kept))
            partial.append(replace(item, success=False, task_score=score, episode_reward=0.0, steps=steps))
    assert len(partial) >= 5
    assert {record.status for record in label_trajectories(partial, adapter)} == {"failed"}
    options = CreditOptions(success_threshold=0.5)
    for item, record in zip(partial, label_trajectories(partial, adapter, options=options), strict=True):
        assert record.status == "labelled" and record.final_score == pytest.approx(item.task_score)
        actions, game = actions_of(item), adapter.make_game(item.task)
        for index, step in enumerate(record.steps):
            shorter = actions[:index] + actions[index + 1 :]
            assert step.ablated_success == replay_naively(game, shorter, adapter.score, item.task_score or 0.0)[0]
        assert record.steps[-1].credit == 1


def test_another_shop_or_a_missing_one_is_named(episodes: list[Trajectory], tmp_path: Path) -> None:
    from agent_system.environments.env_package.webshop.generate import generate_catalogue

    won = [item for item in episodes if item.success][:2]
    other = generate_catalogue(tmp_path / "other", products=10, goals=10, seed=9)
    for record in label_trajectories(won, get_adapter("webshop", other)):
        assert record.status == "unreadable_game" and str(other) in str(record.reason)
        assert "WEBSHOP_DATA" in str(record.reason)
    with pytest.raises(UserError, match="nowhere"):
        get_adapter("webshop", tmp_path / "nowhere")
    with pytest.raises(UserError, match="alfworld, webshop"):
        expert_source("shop", None)


def test_discriminator_data_has_no_product_on_both_sides_and_no_scores(
    episodes: list[Trajectory], shop_dir: Path, tmp_path: Path
) -> None:
    import pandas as pd

    save_trajectories(tmp_path / "t.jsonl", episodes)
    analyze([tmp_path / "t.jsonl"], tmp_path, data_dir=shop_dir)
    won = [item for item in episodes if item.success]
    document = load_credit_analysis(tmp_path / "credit_analysis.json")
    assert len(document["trajectories"]) == len(won)
    assert document["header"]["versions"] == {"webshop_nouns": "table:title_nouns.json"}
    tokenizer = make_tiny_tokenizer(texts=[item.task["instruction"] for item in won])
    prepare([tmp_path / "credit_analysis.json"], tmp_path / "data", tokenizer, max_length=4096, val_share=0.3)
    product = {item.traj_uid: item.task["goal_asin"] for item in won}
    sides = []
    for name in ("train", "val"):
        frame = pd.read_parquet(tmp_path / "data" / f"{name}.parquet")
        sides.append({product[uid] for uid in frame["traj_uid"]})
        for prompt in frame["prompt"]:
            text = prompt[0]["content"]
            assert "Your score" not in text and "[SEP]" not in text and "'Back to Search'" not in text
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_the_discriminator_reads_every_page_once(episodes: list[Trajectory]) -> None:
    long = max((item for item in episodes if item.success), key=lambda item: len(item.steps))
    text = EpisodeText.from_trajectory(long)
    assert text.observations[-1] == f"page {len(long.steps)}: bought"
    pages = [observation for observation in text.observations if not observation.endswith(" again")]
    assert len(pages) == len({step.observation for step in long.steps}) + 1
    assert text.task == long.task["instruction"]


@pytest.mark.parametrize("name", ["run_credit_analysis_webshop.sh", "run_training_webshop.sh"])
def test_scripts_say_how_to_call_them(name: str) -> None:
    script = next((ROOT / "agent_system" / "step_discriminator").rglob(name))
    shown = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True).stdout
    assert "OUT_DIR" in shown and "WebShop" in shown and "alfworld" not in shown.lower() and "source " not in shown
    for word in ("NAME", "NAME=value"):
        wrong = subprocess.run(["bash", str(script), word], capture_output=True, text=True, check=False)
        assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and word in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["LABEL_SOURCE=minimal"], "LABEL_SOURCE=minimal needs MODE=minimal"),
        (["MODE=shortest"], "MODE='shortest'"),
        (["NUM=many"], "NUM='many'"),
        (["NUM=0"], "NUM='0'"),
    ],
)
def test_stage_1_script_refuses_before_it_collects(arguments: list[str], expected: str, tmp_path: Path) -> None:
    script = ROOT / "agent_system/step_discriminator/trajectory_analyzer/run_credit_analysis_webshop.sh"
    words = [*arguments, f"DATA_DIR={tmp_path}/shop", "GENERATE=40", f"OUT_DIR={tmp_path}/out"]
    wrong = subprocess.run(["bash", str(script), *words], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and expected in wrong.stderr
    assert not list(tmp_path.iterdir())


def test_install_scripts_explain_themselves_and_leave_links_alone(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)

    def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "requirements" / name)
        environment = {**os.environ, "VENV": str(link)}
        return subprocess.run(["bash", script, *words], capture_output=True, text=True, check=False, env=environment)

    for name in ("install_cpu.sh", "install_vllm_cpu.sh"):
        assert run(name, "--help").returncode == 0 and f"requirements/{name}" in run(name, "--help").stdout
        assert "unknown argument 'now'" in run(name, "now").stderr and run(name, "now").returncode == 2
        assert run(name).returncode == 2 and "is a link" in run(name).stderr
    assert not list(real.iterdir())


def test_stage_1_script_generates_collects_and_analyses(tmp_path: Path) -> None:
    script = ROOT / "agent_system/step_discriminator/trajectory_analyzer/run_credit_analysis_webshop.sh"
    arguments = [
        f"DATA_DIR={tmp_path}/shop",
        "GENERATE=40",
        "NUM=6",
        f"OUT_DIR={tmp_path}/out",
        "SUCCESS_THRESHOLD=0.5",
    ]
    subprocess.run(["bash", str(script), *arguments], capture_output=True, check=True, timeout=120)
    trajectories, _ = load_trajectories(tmp_path / "out" / "trajectories.jsonl")
    header = json.loads((tmp_path / "out" / "credit_analysis.json").read_text())["header"]
    assert len(trajectories) == 6 and header["options"]["success_threshold"] == 0.5
    assert header["counts"]["labelled"] == sum((item.task_score or 0) >= 0.5 for item in trajectories)
