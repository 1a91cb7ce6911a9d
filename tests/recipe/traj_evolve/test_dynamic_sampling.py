# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling under TrajEvolve: credit comes before filtering, so that wasteful successes are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.toy_env import TOY_TASKS
from tests.recipe.traj_evolve.support import (
    evolve_trainer,
    policy_weights,
    run_evolve,
    run_phases,
    same,
    without_clocks,
)

FILTER = "algorithm.filter_groups.enable=True"
REPLAY = "traj_evolve.credit_source=replay"
TASKS = TOY_TASKS[:2]
"""The second one cannot be won: the policy has no command for it."""


def test_metrics_cover_all_generation_batches(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = evolve_trainer(tiny_model_dir, tmp_path, FILTER, REPLAY, tasks=TASKS)
    state = run_phases(trainer)
    metrics, columns = state.metrics, state.batch.non_tensor_batch
    # Half of the groups play the hopeless task.
    batches = metrics["dynamic_sampling/generation_batches"]
    assert batches >= 2 and metrics["dynamic_sampling/groups_filled"] == 0
    assert len(set(columns["uid"])) == 4 and {e.uid for e in state.episodes} == set(columns["uid"])
    assert {episode.task["name"] for episode in state.episodes} == {"toy-red"}
    assert metrics["rollout/num_episodes"] == 32 * batches
    wins = round(metrics["episode/success_rate"] * 32 * batches)
    assert metrics["traj_evolve/scored_trajectories"] == metrics["traj_evolve/replayed_trajectories"] == wins
    assert wins > sum(episode.success for episode in state.episodes) * 0.99
    assert "shaped_episode_rewards" in columns and metrics["traj_evolve/shaped_minus_raw"] < 0.0


def test_groups_of_successes_are_kept_for_their_waste(tiny_model_dir: Path, tmp_path: Path) -> None:
    patient = ("env.max_steps=40", FILTER, "algorithm.filter_groups.max_num_gen_batches=1")
    trainer = evolve_trainer(tiny_model_dir, tmp_path / "a", *patient, "traj_evolve.enable=False")
    plain = run_phases(trainer, until="prepare")
    shaped = run_phases(evolve_trainer(tiny_model_dir, tmp_path / "b", *patient, REPLAY), until="prepare")
    rewards: dict[str, list[float]] = {}
    for episode in shaped.episodes:
        rewards.setdefault(episode.uid, []).append(episode.episode_reward)
    all_won = [uid for uid, values in rewards.items() if min(values) == 10.0]
    assert all_won, "with so many turns some groups win every episode"
    assert plain.metrics["dynamic_sampling/groups_kept"] == 4 - len(all_won)
    assert shaped.metrics["dynamic_sampling/groups_kept"] == 4


@pytest.mark.parametrize("source", ["replay", "discriminator"])
def test_resume_equals_the_straight_run(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path, source: str
) -> None:
    given = [
        FILTER, f"traj_evolve.credit_source={source}", f"traj_evolve.discriminator_model_path={discriminator_dir}",
        "traj_evolve.evolve_freq=2", "trainer.save_freq=1", "trainer.total_epochs=3",
    ]  # fmt: skip
    straight, lines = run_evolve(tiny_model_dir, tmp_path / "a", *given, tasks=TASKS)
    run_evolve(tiny_model_dir, tmp_path / "b", *given, "trainer.total_training_steps=1", tasks=TASKS)
    resumed, others = run_evolve(tiny_model_dir, tmp_path / "b", *given, tasks=TASKS)
    assert without_clocks(lines) == without_clocks(others)
    assert same(policy_weights(straight), policy_weights(resumed))
    assert max(line["dynamic_sampling/generation_batches"] for line in lines) > 1
