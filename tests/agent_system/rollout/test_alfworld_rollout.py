# SPDX-License-Identifier: Apache-2.0
"""The agent loop on recorded ALFWorld games: an oracle wins them all, random play is reproducible."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_system.environments import EnvironmentManagerBase
from agent_system.environments.env_package.alfworld.envs import build_alfworld_envs
from agent_system.environments.env_package.alfworld.game import AlfworldGame
from agent_system.environments.env_package.alfworld.manager import AlfWorldEnvironmentManager
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from agent_system.environments.env_package.alfworld.oracle import Oracle
from agent_system.environments.env_package.alfworld.projection import alfworld_projection
from agent_system.multi_turn_rollout import TrajectoryCollector, Validator
from tests.helpers.fake_actor import FakeActorGroup
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import say


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tiny_tokenizer()


@pytest.fixture
def make_manager(shared_dir: Path) -> Iterator[Any]:
    made: list[EnvironmentManagerBase] = []

    def make(split: str, slots: int, style: str, num_workers: int = 0) -> AlfWorldEnvironmentManager:
        manifest = load_manifest(shared_dir / "data" / "alfworld", split)
        tasks = [{"gamefile": g.path, "sha256": g.sha256, "task_type": g.task_type} for g in manifest.games]
        kwargs = {"data_dir": manifest.data_dir, "num_workers": num_workers}
        envs = build_alfworld_envs(None, 0, slots, 1, {"num_cpus": 0.1}, env_kwargs=kwargs)
        alfworld = SimpleNamespace(prompt_style=style)
        config: Any = SimpleNamespace(env=SimpleNamespace(history_length=2, alfworld=alfworld))
        manager = AlfWorldEnvironmentManager(
            envs, alfworld_projection, config, tasks=tasks, split=split, panel_hash=manifest.hash
        )
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


def random_command(prompt: str, seed: int) -> str:
    commands = prompt.rsplit("<|im_end|>", 1)[0].split("Commands:\n")[1].split("\n")
    return say(commands[seed % len(commands)])


def test_an_oracle_wins_every_game(tokenizer: Any, make_manager: Any, shared_dir: Path, tmp_path: Path) -> None:
    """Full prompts carry what is needed to follow a plan: the task at every turn, and the number of the turn."""
    manager = make_manager("train", 3, "full")
    plans = {}
    for task in manager.tasks:
        game = AlfworldGame(shared_dir / "data" / "alfworld" / task["gamefile"])
        plans[game.task.removeprefix("Your task is to: ")] = list(Oracle(game))

    def follow(prompt: str, seed: int) -> str:
        match = re.search(r"Your task is to: ([^\n]*)", prompt)
        number = re.search(r"This is step (\d+)", prompt)
        assert match is not None
        return say(plans[match[1]][int(number[1]) - 1 if number else 0])

    config = rollout_config(max_steps=40, prompt=4096, local_dir=str(tmp_path), val_sample=True)
    validator = Validator(config, TrajectoryCollector(config, tokenizer))
    result = validator.validate(manager, FakeActorGroup(tokenizer, follow), step=0)
    assert len(result.episodes) == len(manager.tasks) == len(plans)
    assert all(episode.success and episode.episode_reward == 10.0 for episode in result.episodes)
    assert [len(episode.steps) for episode in result.episodes] == [
        len(plans[episode.task["instruction"].removeprefix("Your task is to: ")]) for episode in result.episodes
    ]
    keys = {key for key in result.metrics if key.endswith("success_rate")}
    assert keys == {
        "val/success_rate",
        "val/look_at_obj_in_light_success_rate",
        "val/pick_clean_then_place_in_recep_success_rate",
        "val/pick_cool_then_place_in_recep_success_rate",
        "val/pick_heat_then_place_in_recep_success_rate",
        "val/pick_two_obj_and_place_success_rate",
    }
    assert all(result.metrics[key] == 1.0 for key in keys)
    assert result.record["split_hash"] == manager.panel_hash


def test_actors_and_this_process_give_equal_episodes(tokenizer: Any, make_manager: Any, ray_session: Any) -> None:
    config = rollout_config(max_steps=6, prompt=1024)
    results = [
        TrajectoryCollector(config, tokenizer).multi_turn_loop(
            make_manager("valid_seen", 6, "compact", num_workers),
            FakeActorGroup(tokenizer, random_command),
            step=3,
            num_tasks=3,
            group_size=2,
        )
        for num_workers in (0, 2)
    ]
    assert results[0].episodes == results[1].episodes
    episode = results[0].episodes[0]
    assert len({step.state_key for step in episode.steps}) > 1
    assert all(step.action in step.admissible_actions for step in episode.steps)
    assert set(episode.task) == {"gamefile", "sha256", "task_type", "instruction"}
    assert results[0].metrics["episode/admissible_action_ratio"] == 1.0
