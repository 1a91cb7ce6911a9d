# SPDX-License-Identifier: Apache-2.0
"""One group by hand: replayed labels, rho, shaped rewards, advantages, metrics; and what happens to odd episodes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.trajectory import Step, Trajectory
from recipe.traj_evolve.hook import TrajEvolveHook, cut
from tests.recipe.traj_evolve.support import ToyGame, evolve_config
from verl.protocol import DataProto
from verl.trainer.ppo.batch_ops import compute_advantage, compute_step_returns
from verl.trainer.ppo.recipes import TrainerContext

RED, BLUE, KEY, BACK = "open the red door", "open the blue door", "take the red key", "go back"
# Deleting `go back` in the second episode leaves the player in the pit, so it is necessary, and the visit redundant.
ACTIONS = {
    "short": [RED, KEY],
    "visit": [BLUE, BACK, RED, KEY],
    "idle": [BACK, RED, KEY],
    "lost": [BLUE, BACK, BLUE],
}
LABELS = {"short": [1, 1], "visit": [0, 1, 1, 1], "idle": [0, 1, 1]}
RESPONSE = 3


def play(name: str, actions: Sequence[str], task: str = "toy-red") -> Trajectory:
    game = ToyGame({"name": task})
    observation, info = game.reset()
    steps = []
    for index, action in enumerate(actions):
        key, commands = game.state_key, tuple(info["admissible_commands"])
        after, reward, done, info = game.step(action)
        steps.append(Step(index, observation, commands, None, action, True, reward, done, key))
        observation = after
    won = any(step.done for step in steps)
    return Trajectory(
        1,
        name,
        "g0",
        "toy",
        {"name": task},
        {"kind": "test"},
        won,
        10.0 * won,
        None,
        not won,
        tuple(steps),
        observation,
    )


def rows_of(episodes: Sequence[Trajectory]) -> DataProto:
    """One row a turn, scored as the reward manager does: the episode's reward at the last of two tokens."""
    rows = [(episode, step) for episode in episodes for step in episode.steps]
    mask = torch.tensor([[1, 1, 0]] * len(rows))
    scores = torch.zeros(len(rows), RESPONSE)
    scores[:, 1] = torch.tensor([episode.episode_reward for episode, _ in rows])
    columns: dict[str, list[Any]] = {
        "uid": [episode.uid for episode, _ in rows],
        "traj_uid": [episode.traj_uid for episode, _ in rows],
        "step_index": [step.step_index for _, step in rows],
        "episode_rewards": [episode.episode_reward for episode, _ in rows],
        "rewards": [step.reward for _, step in rows],
    }
    return DataProto.from_dict(
        {"response_mask": mask, "token_level_scores": scores},
        {name: np.array(values, dtype=object) for name, values in columns.items()},
    )


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Any:
    """`run(episodes, *overrides)`: the hook's three calls of a step around the core's estimator."""

    def run_hook(episodes: Sequence[Trajectory], *overrides: str) -> tuple[TrajEvolveHook, TrainerContext, DataProto]:
        given = ["traj_evolve.credit_source=replay", *overrides]
        config, _ = evolve_config(tiny_model_dir, tmp_path / "unused", *given)
        hook = TrajEvolveHook(config)
        envs = SimpleNamespace(env_name="toy", data_dir=None)
        ctx = TrainerContext(config, 1, 0, None, {}, {}, lambda name: nullcontext(), envs, episodes)
        hook.init_workers(ctx)
        batch = rows_of(episodes)
        hook.after_rollout(ctx, batch)
        batch.batch["step_rewards"] = compute_step_returns(batch, config.algorithm.gamma)
        hook.after_reward(ctx, batch)
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        compute_advantage(batch, "grpo", config.algorithm)
        hook.after_advantage(ctx, batch)
        return hook, ctx, batch

    return run_hook


def group() -> list[Trajectory]:
    return [play(name, actions) for name, actions in ACTIONS.items()]


def test_a_group_by_hand(run: Any) -> None:
    _, ctx, batch = run(group())
    columns = batch.non_tensor_batch
    names = columns["traj_uid"].tolist()
    credit = [value for label in LABELS.values() for value in label] + [None] * 3
    assert [None if np.isnan(value) else value for value in columns["step_credit"]] == credit
    assert columns["is_redundant_step"].tolist() == [value == 0 for value in credit]
    shaped = {"short": 10.0, "visit": 7.5, "idle": 10 * (1 - 1 / 3), "lost": 0.0}
    assert columns["shaped_episode_rewards"].tolist() == pytest.approx([shaped[name] for name in names])
    assert columns["episode_rewards"].tolist() == [0.0 if name == "lost" else 10.0 for name in names]
    assert sum(columns["rewards"]) == 30.0
    scores = batch.batch["token_level_scores"]
    torch.testing.assert_close(scores[:, 1], torch.tensor([shaped[name] for name in names]))
    assert scores[:, [0, 2]].abs().max() == 0.0
    # Group statistics over rows, as GRPO's defaults have it: an episode counts once per turn.
    values = [shaped[name] for name in names]
    mean, std = statistics.mean(values), statistics.stdev(values)
    expected = torch.tensor([[(value - mean) / (std + 1e-6)] * 2 + [0.0] for value in values])
    torch.testing.assert_close(batch.batch["advantages"], expected, atol=1e-5, rtol=0)
    steps = 2 * 1 + 4 * 3 + 3 * 2 + 4 + 3 + 2  # an upper bound: naive replays and one whole replay each
    assert 0 < ctx.metrics.pop("traj_evolve/env_steps_replayed") <= steps
    assert ctx.metrics == pytest.approx(
        {
            "traj_evolve/scored_trajectories": 3,
            "traj_evolve/replayed_trajectories": 3,
            "traj_evolve/unlabelled_trajectories": 0,
            "traj_evolve/redundancy_rate": 2 / 9,
            "traj_evolve/mean_credit": 7 / 9,
            "traj_evolve/mean_rho": (0 + 1 / 4 + 1 / 3) / 3,
            "traj_evolve/shaped_minus_raw": -(2.5 + 10 / 3) / 4,
        }
    )


def test_minimal_labels_count_the_way_back_too(run: Any) -> None:
    _, ctx, batch = run(group(), "traj_evolve.label_source=minimal")
    credit = batch.non_tensor_batch["step_credit"].astype(float)
    labels = [*LABELS["short"], 0, 0, 1, 1, *LABELS["idle"]]
    assert credit[: len(labels)].tolist() == labels and np.isnan(credit[len(labels) :]).all()
    shaped = dict(zip(batch.non_tensor_batch["traj_uid"], batch.non_tensor_batch["shaped_episode_rewards"]))
    assert shaped == pytest.approx({"short": 10.0, "visit": 5.0, "idle": 10 * (1 - 1 / 3), "lost": 0.0})
    assert ctx.metrics["traj_evolve/redundancy_rate"] == pytest.approx(3 / 9)


def test_absolute_penalty_and_smaller_alpha(run: Any) -> None:
    _, _, batch = run(group(), "traj_evolve.penalty=absolute", "traj_evolve.alpha=0.5")
    shaped = dict(zip(batch.non_tensor_batch["traj_uid"], batch.non_tensor_batch["shaped_episode_rewards"]))
    assert shaped == pytest.approx({"short": 10.0, "visit": 10 - 1.25, "idle": 10 - 5 / 3, "lost": 0.0})


def test_step_level_spares_negative_advantages(run: Any) -> None:
    _, _, episode = run(group(), "traj_evolve.alpha=0.4")
    _, _, step = run(group(), "traj_evolve.alpha=0.4", "traj_evolve.level=step")
    redundant = step.non_tensor_batch["is_redundant_step"].astype(bool)
    before, after = episode.batch["advantages"], step.batch["advantages"]
    assert redundant.sum() == 2 and (before[redundant][:, 0] > 0).all()
    torch.testing.assert_close(after[redundant], before[redundant] * 0.6)
    assert torch.equal(after[~redundant], before[~redundant])
    # In a group of successes only, the wasteful ones are below the mean: their advantages stay as they are.
    winners = [episode for episode in group() if episode.success]
    _, _, episode = run(winners)
    _, _, step = run(winners, "traj_evolve.level=step")
    assert torch.equal(episode.batch["advantages"], step.batch["advantages"])


def test_exploration_can_be_exempt(run: Any) -> None:
    _, ctx, batch = run(group(), "traj_evolve.count_exploration=False")
    redundant = batch.non_tensor_batch["is_redundant_step"].astype(bool)
    # Opening the blue door showed something; going back in the hall did not.
    assert batch.non_tensor_batch["traj_uid"][redundant].tolist() == ["idle"]
    assert ctx.metrics["traj_evolve/redundancy_rate"] == pytest.approx(2 / 9)
    assert ctx.metrics["traj_evolve/mean_rho"] == pytest.approx(1 / 9)


def test_exploration_from_the_record_is_that_of_the_replay(run: Any) -> None:
    hook, ctx, _ = run(group())
    for episode, record in zip(group()[:3], hook._label(ctx, group()[:3])):
        redundant = [step.credit == 0 for step in record.steps]
        kinds = [step.redundancy_kind == "exploration" for step in record.steps]
        assert (hook._explored(episode) & np.array(redundant)).tolist() == kinds


def test_steps_after_the_success_are_not_judged(run: Any) -> None:
    longer = play("idle", [*ACTIONS["idle"], "wait"])
    assert len(longer.steps) == 4 and longer.success
    _, ctx, batch = run([longer, play("lost", ACTIONS["lost"])])
    assert batch.non_tensor_batch["step_credit"][:3].tolist() == [0, 1, 1]
    assert np.isnan(batch.non_tensor_batch["step_credit"][3]) and not batch.non_tensor_batch["is_redundant_step"][3]
    assert ctx.metrics["traj_evolve/mean_rho"] == pytest.approx(1 / 3)
    shorter = cut(longer, 3)
    assert shorter == replace(longer, steps=longer.steps[:3], final_observation="You are in the vault.")
    assert cut(shorter, 3) is shorter


def test_what_cannot_be_replayed_keeps_its_reward(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    liar = replace(play("liar", ACTIONS["lost"]), success=True, episode_reward=10.0)
    _, ctx, batch = run([liar, play("idle", ACTIONS["idle"])])
    assert batch.non_tensor_batch["shaped_episode_rewards"][:3].tolist() == [10.0] * 3
    assert np.isnan(batch.non_tensor_batch["step_credit"][:3].astype(float)).all()
    assert (
        ctx.metrics["traj_evolve/scored_trajectories"] == 1 and ctx.metrics["traj_evolve/unlabelled_trajectories"] == 1
    )
    assert "1 of 2 successes could not be labelled" in caplog.text and "did not succeed" in caplog.text


def test_a_step_without_success_changes_nothing(run: Any) -> None:
    _, ctx, batch = run([play("lost", ACTIONS["lost"]), play("lost2", [BACK])])
    assert ctx.metrics == {"traj_evolve/scored_trajectories": 0, "traj_evolve/shaped_minus_raw": 0.0}
    assert batch.batch["token_level_scores"].abs().max() == 0.0


def test_an_empty_response_stays_unscored(run: Any) -> None:
    """Rows without a token have no place for a reward."""
    hook, ctx, batch = run(group())
    batch.batch["response_mask"][2] = 0
    batch.batch["token_level_scores"] = torch.zeros(len(batch), RESPONSE)
    hook.after_reward(ctx, batch)
    assert batch.batch["token_level_scores"][2].abs().max() == 0.0 and batch.batch["token_level_scores"][3, 1] == -2.5


@pytest.mark.parametrize("estimator", ["gigpo", "hgpo"])
def test_step_returns_are_those_of_a_shaped_last_reward(run: Any, estimator: str) -> None:
    """Estimators that read step returns see the shaping too: as if the last turn had paid the shaped reward."""
    gamma = 0.9
    _, _, batch = run(group(), f"algorithm.adv_estimator={estimator}", f"algorithm.gamma={gamma}")
    columns = batch.non_tensor_batch
    shaped = columns["rewards"].astype(float)
    uids = [*columns["traj_uid"], None]
    last = [row for row in range(len(shaped)) if uids[row] != uids[row + 1]]
    for row in last:
        shaped[row] += columns["shaped_episode_rewards"][row] - columns["episode_rewards"][row]
    expected, running = [0.0] * len(shaped), 0.0
    for row in reversed(range(len(shaped))):
        running = expected[row] = shaped[row] + gamma * (0.0 if row in last else running)
    assert batch.batch["step_rewards"].tolist() == pytest.approx(expected)
    assert expected != pytest.approx(compute_step_returns(batch, gamma).tolist())
