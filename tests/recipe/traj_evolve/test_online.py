# SPDX-License-Identifier: Apache-2.0
"""Everything real: policy, discriminator, replayed labels, online updates, checkpoints; only the sizes are small."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.trajectory import load_trajectories
from tests.helpers.toy_env import TOY_TASKS
from tests.recipe.traj_evolve.support import (
    discriminator_weights,
    evolve_trainer,
    policy_weights,
    run_evolve,
    run_phases,
    same,
    without_clocks,
)
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.errors import UserError

TASKS = TOY_TASKS[:2]
"""The second one cannot be won: the policy has no command for it."""
EVERY_STEP = {
    *(f"traj_evolve/{x}" for x in ("redundancy_rate", "mean_rho", "mean_credit", "shaped_minus_raw")),
    "traj_evolve/scored_trajectories", "timing_s/score_credit",
}  # fmt: skip
UPDATES = {
    *(f"traj_evolve/discriminator_{x}" for x in ("agreement_before", "agreement_after", "loss", "rows")),
    "traj_evolve/discriminator_skipped_steps", "traj_evolve/replayed_trajectories", "traj_evolve/env_steps_replayed",
    "timing_s/evolve_discriminator", "timing_s/replay",
}  # fmt: skip


def options(discriminator: Path) -> list[str]:
    """Updates after the steps 2 and 4, a checkpoint between them."""
    return [
        f"traj_evolve.discriminator_model_path={discriminator}", "traj_evolve.evolve_freq=2",
        "traj_evolve.discriminator_lr=1e-3", "traj_evolve.update_batch_size=16",
        "traj_evolve.discriminator_epochs=2", "trainer.total_epochs=4", "trainer.save_freq=3",
    ]  # fmt: skip


def hook_of(trainer: RayPPOTrainer) -> Any:
    return trainer.hooks[0]


def optimizer_state(trainer: RayPPOTrainer) -> list[torch.Tensor]:
    optimizer = trainer.worker_groups["discriminator"].worker.optimizer  # type: ignore[attr-defined]
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.fixture(scope="module")
def straight(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RayPPOTrainer, list[dict[str, Any]], Path]:
    """Four steps without interruption."""
    folder = tmp_path_factory.mktemp("straight")
    trainer, lines = run_evolve(tiny_model_dir, folder, *options(discriminator_dir), tasks=TASKS)
    return trainer, lines, folder


def test_every_metric_is_logged_in_its_step(straight: tuple[RayPPOTrainer, list[dict[str, Any]], Path]) -> None:
    _, lines, _ = straight
    for line in lines:
        assert set(line) >= EVERY_STEP, sorted(EVERY_STEP - set(line))
        found = UPDATES & set(line)
        assert found == (UPDATES if line["step"] in (2, 4) else set()), (line["step"], found)
        assert all(math.isfinite(value) for value in line.values())
        assert 0.0 < line["traj_evolve/mean_credit"] < 1.0
        assert line["traj_evolve/shaped_minus_raw"] <= 0.0
        assert line["traj_evolve/scored_trajectories"] == line["episode/success_rate"] * 32
        assert line["timing_s/score_credit"] > 0.0
    # What was won since the last update was replayed: the successes of two steps each.
    scored = [line["traj_evolve/scored_trajectories"] for line in lines]
    assert lines[1]["traj_evolve/replayed_trajectories"] == scored[0] + scored[1]
    assert lines[3]["traj_evolve/replayed_trajectories"] == scored[2] + scored[3]


def test_updates_teach_the_discriminator(
    straight: tuple[RayPPOTrainer, list[dict[str, Any]], Path], tiny_model_dir: Path, discriminator_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    trainer, lines, _ = straight
    start = evolve_trainer(tiny_model_dir, tmp_path / "start", *options(discriminator_dir))
    assert not same(discriminator_weights(trainer), discriminator_weights(start))
    # A discriminator that was told the labels many times repeats them.
    eager = ["traj_evolve.discriminator_epochs=25", "trainer.total_epochs=2", "trainer.save_freq=-1"]
    lines = run_evolve(tiny_model_dir, tmp_path / "eager", *options(discriminator_dir), *eager, tasks=TASKS)[1]
    before, after = (lines[1][f"traj_evolve/discriminator_agreement_{x}"] for x in ("before", "after"))
    assert before < 0.9 and after > 0.95 and lines[1]["traj_evolve/discriminator_skipped_steps"] == 0, (before, after)


def test_scores_are_those_of_the_plain_model(tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path) -> None:
    """`step_credit` of the sharded worker = the scorer on the folder's model, loaded without any of this."""
    from transformers import AutoModelForCausalLM

    from agent_system.step_discriminator.discriminator import DiscriminatorConfig, DiscriminatorScorer
    from verl.utils.tokenizer import hf_tokenizer

    trainer = evolve_trainer(tiny_model_dir, tmp_path, *options(discriminator_dir), "traj_evolve.score_batch_size=3")
    state = run_phases(trainer)
    model = AutoModelForCausalLM.from_pretrained(discriminator_dir)
    tokenizer = hf_tokenizer(str(discriminator_dir))
    scorer = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig.load(discriminator_dir))
    columns = state.batch.non_tensor_batch
    won = {episode.traj_uid: episode for episode in state.episodes if episode.success}
    assert 2 < len(won) < len(state.episodes)
    credits = dict(zip(won, scorer.score(list(won.values()))))
    for row, uid in enumerate(columns["traj_uid"]):
        credit = columns["step_credit"][row]
        if uid in won:
            assert credit == pytest.approx(credits[uid][columns["step_index"][row]], abs=1e-5)
            assert columns["is_redundant_step"][row] == (credit < 0.5)
            redundant = credits[uid] < 0.5
            assert columns["shaped_episode_rewards"][row] == pytest.approx(10 * (1 - redundant.mean()))
        else:
            assert np.isnan(credit) and columns["shaped_episode_rewards"][row] == 0.0


def test_resume_equals_the_straight_run(
    straight: tuple[RayPPOTrainer, list[dict[str, Any]], Path], tiny_model_dir: Path, discriminator_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    whole, lines, folder = straight
    first = evolve_trainer(tiny_model_dir, tmp_path, *options(discriminator_dir), tasks=TASKS)
    first.total_steps = 3
    first.fit()
    torch.manual_seed(999)
    np.random.seed(999)
    second = evolve_trainer(tiny_model_dir, tmp_path, *options(discriminator_dir), tasks=TASKS)
    second._resume()
    assert hook_of(second).num_updates == 1
    assert list(hook_of(second).buffer) == list(hook_of(first).buffer) and hook_of(second).buffer
    assert same(discriminator_weights(second), discriminator_weights(first))
    second, resumed = run_evolve(tiny_model_dir, tmp_path, *options(discriminator_dir), tasks=TASKS)
    assert without_clocks(resumed) == without_clocks(lines)
    assert same(policy_weights(second), policy_weights(whole))
    assert same(discriminator_weights(second), discriminator_weights(whole))
    pairs = zip(optimizer_state(second), optimizer_state(whole), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert hook_of(second).num_updates == hook_of(whole).num_updates == 2
    for name in ("trainer_state.json", "hooks/traj_evolve/buffer.jsonl"):
        files = [(root / "global_step_4" / name).read_text() for root in (folder, tmp_path)]
        assert files[0] == files[1], name


def test_buffer_is_bounded_and_newest_come_first(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["traj_evolve.buffer_size=7", "traj_evolve.max_replay_trajectories=5", "traj_evolve.evolve_freq=3"]
    trainer = evolve_trainer(tiny_model_dir, tmp_path, *options(discriminator_dir), *few)
    hook = hook_of(trainer)
    asked, held, wins = [], [], []
    evolve, after_rollout = hook._evolve, hook.after_rollout

    def spy_evolve(ctx: Any, trajectories: Any) -> None:
        asked.append([trajectory.traj_uid for trajectory in trajectories])
        evolve(ctx, trajectories)

    def spy_rollout(ctx: Any, batch: Any) -> None:
        after_rollout(ctx, batch)
        held.append(len(hook.buffer))
        wins.extend(episode.traj_uid for episode in ctx.episodes if episode.success)

    monkeypatch.setattr(hook, "_evolve", spy_evolve)
    monkeypatch.setattr(hook, "after_rollout", spy_rollout)
    trainer.total_steps = 3
    trainer.fit()
    assert max(held) == 7 and len(wins) > 7
    assert asked == [wins[-5:][::-1]] and not hook.buffer
    saved, report = load_trajectories(tmp_path / "global_step_3/hooks/traj_evolve/buffer.jsonl")
    assert not report.bad and saved == []


def test_a_checkpoint_without_discriminator_is_refused(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path
) -> None:
    run = [*options(discriminator_dir), "trainer.total_epochs=1", "trainer.save_freq=1"]
    run_evolve(tiny_model_dir, tmp_path, *run, "traj_evolve.credit_source=replay")
    with pytest.raises(UserError, match=r"holds no discriminator.*credit_source.*resume_mode=disable"):
        evolve_trainer(tiny_model_dir, tmp_path, *run).fit()
    state = json.loads((tmp_path / "global_step_1" / "trainer_state.json").read_text())
    assert state["hooks"] == {"traj_evolve": {"num_updates": 0}}


def test_an_epoch_without_success_leaves_the_discriminator_alone(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path
) -> None:
    run = [*options(discriminator_dir), "env.max_steps=1", "traj_evolve.evolve_freq=1", "trainer.total_epochs=1"]
    trainer, lines = run_evolve(tiny_model_dir, tmp_path, *run)
    assert lines[0]["traj_evolve/scored_trajectories"] == 0 and not UPDATES & set(lines[0])
    start = evolve_trainer(tiny_model_dir, tmp_path / "start", *run)
    assert same(discriminator_weights(trainer), discriminator_weights(start))
