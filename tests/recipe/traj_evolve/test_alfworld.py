# SPDX-License-Identifier: Apache-2.0
"""Exact credit on generated ALFWorld games through the real trainer; only the policy is scripted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from agent_system.environments import make_envs
from agent_system.environments.env_package.alfworld import AlfworldGame
from agent_system.environments.env_package.alfworld.experts import Explorer
from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.multi_turn_rollout.seats import sampling_seed
from agent_system.trajectory import task_key
from recipe.traj_evolve.shaping import MAX_EPISODE_REWARD
from tests.helpers.fake_actor import FakeActorGroup
from tests.recipe.traj_evolve.support import MODULE, logged, run_phases
from tests.verl.trainer.fakes import FakePolicy
from tests.verl.trainer.toy_run import toy_overrides
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.local import create_local_colocated
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import build_trainer, read_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.tokenizer import hf_tokenizer

NUM_TASKS, MEMBERS, MAX_STEPS = 3, 3, 40
DETOUR_RATES = (0.0, 0.5, None)
"""By member of a group; None only looks around and so fails."""


class Script(FakePolicy):
    """Says, for every sampling seed, the response of a table; updates count only."""

    model: ClassVar[str] = ""
    answers: ClassVar[dict[int, str]] = {}

    @register(Dispatch.DP_COMPUTE)
    def generate_some(self, data: DataProto) -> DataProto:
        actor = FakeActorGroup(hf_tokenizer(self.model), lambda _, seed: self.answers[seed], response_length=64)
        return actor.generate_some(data)


def scripted_groups(roles: Mapping[str, ClassWithInitArgs]) -> dict[str, WorkerGroup]:
    return dict(create_local_colocated({"actor_rollout": ClassWithInitArgs(Script)}))


def explore(path: Path, detour_rate: float, seed: int) -> list[str]:
    """The explorer's commands up to its success."""
    game = AlfworldGame(path)
    observation, info = game.reset()
    explorer = Explorer(game, np.random.default_rng(seed), detour_rate, max_steps=MAX_STEPS)
    actions: list[str] = []
    while not info["won"]:
        actions.append(explorer.act(observation, info).action)
        observation, _, _, info = game.step(actions[-1])
    return actions


def wins(path: Path, actions: list[str]) -> bool:
    game = AlfworldGame(path)
    game.reset()
    return any(game.step(action)[3]["won"] for action in actions)


def script_for(trainer: RayPPOTrainer, games: Path) -> dict[int, str]:
    """Fill the table for training step 1, for every game that could be drawn."""
    answers = {}
    for task in trainer.train_envs.tasks:
        for member, rate in enumerate(DETOUR_RATES):
            actions = ["look"] * MAX_STEPS if rate is None else explore(games / task["gamefile"], rate, member)
            for turn, action in enumerate(actions):
                key = sampling_seed(trainer.config.env.seed, "step1", task_key(task), member, turn)
                answers[key] = f"<think>so</think><action>{action}</action>"
    return answers


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_games(tmp_path_factory.mktemp("games") / "few", 6, 1, 1, seed=4, max_receptacles=6)


@pytest.fixture
def trainer(tiny_model_dir: Path, games: Path, tmp_path: Path) -> Any:
    given = [
        *toy_overrides(tiny_model_dir, tmp_path), "traj_evolve.credit_source=replay",
        f"env.alfworld.data_dir={games}", "env.num_workers=0", f"env.max_steps={MAX_STEPS}", f"env.rollout.n={MEMBERS}",
        f"data.train_batch_size={NUM_TASKS}", "data.max_prompt_length=1024", "data.max_response_length=64",
        "env.alfworld.prompt_style=compact", "data.truncation=left", "trainer.total_epochs=1",
    ]  # fmt: skip
    cfg = load_config("traj_evolve_trainer", given, "recipe.traj_evolve.config")
    config, recipes = read_config(cfg, (MODULE,))
    train_envs, val_envs = make_envs(config)
    built = build_trainer(
        config, recipes, device="cpu", make_worker_groups=scripted_groups, train_envs=train_envs, val_envs=val_envs
    )
    built.init_workers()
    Script.model, Script.answers = str(tiny_model_dir), script_for(built, games)
    yield built
    train_envs.close()
    val_envs.close()


def test_replayed_credit_shapes_the_update(trainer: Any, games: Path) -> None:
    state = run_phases(trainer)
    columns = state.batch.non_tensor_batch
    rhos, rate, steps, failed = [], [], 0, 0
    rewards: dict[str, float] = {}
    for episode in state.episodes:
        path = games / episode.task["gamefile"]
        actions = [step.action for step in episode.steps]
        rows = columns["traj_uid"] == episode.traj_uid
        if not episode.success:
            failed += 1
            assert np.isnan(columns["step_credit"][rows].astype(float)).all()
            rewards[episode.traj_uid] = 0.0
            continue
        # The naive way: the whole game from its start for every step.
        labels = [not wins(path, actions[:i] + actions[i + 1 :]) for i in range(len(actions))]
        assert columns["step_credit"][rows].tolist() == labels and labels[-1]
        rho = 1 - np.mean(labels)
        rhos.append(rho)
        rate += [not label for label in labels]
        steps += len(actions)
        rewards[episode.traj_uid] = MAX_EPISODE_REWARD * (1 - rho)
    assert failed == NUM_TASKS and len(rhos) == 2 * NUM_TASKS and max(rhos) > 0.0
    expected = np.array([rewards[uid] for uid in columns["traj_uid"]])
    assert columns["shaped_episode_rewards"].tolist() == pytest.approx(expected.tolist())
    metrics = state.metrics
    assert metrics["traj_evolve/mean_rho"] == pytest.approx(np.mean(rhos))
    assert metrics["traj_evolve/redundancy_rate"] == pytest.approx(np.mean(rate))
    assert metrics["traj_evolve/shaped_minus_raw"] == pytest.approx(-10 * sum(rhos) / (NUM_TASKS * MEMBERS))
    assert metrics["traj_evolve/replayed_trajectories"] == 2 * NUM_TASKS
    assert metrics["traj_evolve/env_steps_replayed"] >= steps
    # GRPO over the rows of each group, the penalty for invalid actions on top.
    valid = columns["is_action_valid"].astype(float)
    scores = torch.tensor(expected - 0.1 * (1 - valid))
    mask = state.batch.batch["response_mask"]
    for group in set(columns["uid"]):
        rows = torch.tensor(columns["uid"] == group)
        values = scores[rows]
        wanted = ((values - values.mean()) / (values.std() + 1e-6)).float().unsqueeze(-1) * mask[rows]
        torch.testing.assert_close(state.batch.batch["advantages"][rows], wanted, atol=1e-5, rtol=0)


def test_the_whole_step_runs_and_logs(trainer: Any) -> None:
    trainer.fit()
    (line,) = logged(trainer.store.root)
    names = ("redundancy_rate", "mean_rho", "mean_credit", "shaped_minus_raw", "scored_trajectories")
    assert all(f"traj_evolve/{name}" in line for name in names)
    assert line["timing_s/score_credit"] >= line["timing_s/replay"] > 0.0
    assert line["episode/success_rate"] == pytest.approx(2 / 3)
