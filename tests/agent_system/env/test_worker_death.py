# SPDX-License-Identifier: Apache-2.0
"""Environment actors that are killed or hang: whole trajectories are as if nothing had happened, or the run ends with
a message that names task and call."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_system.environments.env_package.alfworld.envs import AlfworldEnvFactory
from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.environments.env_package.alfworld.manager import make_alfworld_manager
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from agent_system.environments.ray_vector_env import RayVectorEnv
from agent_system.environments.vector_env import EnvironmentFailure, LocalVectorEnv, VectorEnv
from agent_system.multi_turn_rollout import TrajectoryCollector
from tests.agent_system.env.test_managers import alfworld_config
from tests.helpers.fake_actor import FakeActorGroup, choose_command
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import TOY_TASKS, ForgetfulEnv, SlowEnv, ToyEnv, TroubleEnv, toy_manager

pytestmark = pytest.mark.usefixtures("ray_session")


def pid_of(envs: RayVectorEnv, worker: int) -> int:
    import ray

    pid: int = ray.get(envs._actors[worker].__ray_call__.remote(lambda host: os.getpid()))
    return pid


def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is gone."""
    os.kill(pid, signal.SIGKILL)
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> tuple[AlfworldEnvFactory, list[dict[str, Any]]]:
    folder = generate_games(tmp_path_factory.mktemp("games") / "g", 3, 0, 0, seed=2, max_receptacles=9)
    tasks = [{"gamefile": game.path} for game in load_manifest(folder, "train").games]
    return AlfworldEnvFactory(str(folder)), [tasks[slot // 2] for slot in range(6)]


def play(envs: VectorEnv, tasks: list[dict[str, Any]], kill_before: dict[int, int]) -> list[Any]:
    """Random play of all slots (two of them stop early); before turn t the worker `kill_before[t]` is killed."""
    rng = np.random.default_rng(5)
    observations, infos = envs.reset(tasks)
    log: list[Any] = [(observations, infos)]
    commands = [info["admissible_commands"] for info in infos]
    for turn in range(12):
        if turn in kill_before and isinstance(envs, RayVectorEnv):
            kill(pid_of(envs, kill_before[turn]))
        slots = list(rng.permutation(6 if turn < 7 else 4))
        actions = [str(rng.choice(commands[slot])) if rng.random() < 0.9 else "nonsense" for slot in slots]
        result = envs.step([int(slot) for slot in slots], actions)
        for slot, info in zip(slots, result[3]):
            commands[slot] = info["admissible_commands"]
        log.append(result)
    return log


@pytest.mark.parametrize(("workers", "kill_before"), [(2, {3: 1, 8: 0, 9: 0}), (3, {0: 2, 11: 1})])
def test_a_killed_actor_changes_no_trajectory(
    games: tuple[AlfworldEnvFactory, list[dict[str, Any]]], workers: int, kill_before: dict[int, int]
) -> None:
    factory, tasks = games
    envs = RayVectorEnv(factory, 6, workers, timeout_s=60)
    try:
        assert play(envs, tasks, kill_before) == play(LocalVectorEnv(factory, 6), tasks, {})
        assert envs.num_replaced == len(kill_before)
        # The next episodes start in the new actors; one killed between episodes is replaced as well.
        kill(pid_of(envs, 0))
        assert envs.reset(tasks) == LocalVectorEnv(factory, 6).reset(tasks)
        assert envs.num_replaced == len(kill_before) + 1
    finally:
        envs.close()


def test_an_actor_killed_in_the_middle_of_a_step() -> None:
    envs = RayVectorEnv(SlowEnv, 4, 2, timeout_s=60)
    tasks = [TOY_TASKS[slot % 3] for slot in range(4)]
    try:
        envs.reset(tasks)
        envs.step([0, 1, 2, 3], ["open the red door"] * 4)
        pid = pid_of(envs, 1)
        # Slot 2 has moved by then and slot 3 has not: neither may be moved twice.
        killer = threading.Timer(0.6, os.kill, (pid, signal.SIGKILL))
        killer.start()
        observations, rewards, _, _ = envs.step([0, 1, 2, 3], ["take the red key", "go back", "go back", "look"])
        killer.join()
        assert observations == [
            "You are in the vault.",
            "You are in the hall.",
            "You are in the hall.",
            "Nothing happens.",
        ]
        assert rewards == [10.0, 0.0, 0.0, 0.0] and envs.num_replaced == 1
        assert envs.step([3], ["take the red key"])[0] == ["You are in the vault."]
    finally:
        envs.close()


def test_whole_rollouts_are_equal(caplog: pytest.LogCaptureFixture) -> None:
    """Through manager and collector: rows, rewards and records are those of an undisturbed run."""
    tokenizer = make_tiny_tokenizer()

    def roll(envs: VectorEnv, kill_at: int) -> Any:
        calls = 0

        def policy(prompt: str, seed: int) -> str:
            nonlocal calls
            calls += 1
            if calls == kill_at and isinstance(envs, RayVectorEnv):
                kill(pid_of(envs, 1))
            return choose_command(prompt, seed)

        collector = TrajectoryCollector(rollout_config(max_steps=6), tokenizer)
        manager = toy_manager(6, envs=envs)
        try:
            return collector.multi_turn_loop(
                manager, FakeActorGroup(tokenizer, policy), step=1, num_tasks=2, group_size=3
            )
        finally:
            manager.close()

    undisturbed = roll(LocalVectorEnv(ToyEnv, 6), 0)
    with caplog.at_level(logging.WARNING):
        disturbed = roll(RayVectorEnv(ToyEnv, 6, 3, timeout_s=60), 14)
    assert disturbed.episodes == undisturbed.episodes
    for name, column in undisturbed.batch.non_tensor_batch.items():
        assert (disturbed.batch.non_tensor_batch[name] == column).all(), name
    assert "environment actor 1 of 3 died during step (slot 2: " in caplog.text and "replacing it" in caplog.text


def test_a_replay_that_differs_is_an_error() -> None:
    envs = RayVectorEnv(ForgetfulEnv, 2, 2, timeout_s=60)
    try:
        envs.reset(list(TOY_TASKS[:2]))
        envs.step([0, 1], ["open the red door", "open the red door"])
        kill(pid_of(envs, 1))
        envs.step([1], ["go back"])  # slot 1 went into the pit, which every process describes alike
        kill(pid_of(envs, 0))
        expected = (
            r"slot 0, task toy-red: after its actor died.*differs at action 1 \('open the red door'\).*not determin"
        )
        with pytest.raises(EnvironmentFailure, match=expected):
            envs.step([0], ["go back"])
    finally:
        envs.close()


def test_a_hung_environment_is_reported_with_task_and_call() -> None:
    envs = RayVectorEnv(TroubleEnv, 4, 2, timeout_s=60)
    tasks = [TOY_TASKS[0], TOY_TASKS[2], TOY_TASKS[0], {"name": "hang"}]
    envs.reset([TOY_TASKS[0]] * 4)  # actors are up
    envs._timeout_s = 1.0
    start = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"actor 1 of 2 did not answer reset within 1 s: slot 3, task hang"):
        envs.reset(tasks)
    assert time.monotonic() - start < 10
    # Afterwards the slots are usable: the hung actor was killed, and a new one takes its place.
    envs._timeout_s = 60.0
    assert envs.reset([TOY_TASKS[0]] * 4)[0] == ["You are in the hall."] * 4
    with pytest.raises(EnvironmentFailure, match=r"slot 2, task toy-red, has been in step\('hang'\) for 1 s"):
        envs._timeout_s = 1.0
        envs.step([0, 2, 3], ["look", "hang", "look"])
    envs.close()


def test_the_time_out_comes_from_the_configuration(games: tuple[AlfworldEnvFactory, list[dict[str, Any]]]) -> None:
    config = alfworld_config(workers=2, data_dir=games[0].data_dir, timeout=17.0)
    manager = make_alfworld_manager(config, True)
    assert isinstance(manager.envs, RayVectorEnv) and manager.envs._timeout_s == 17.0
