# SPDX-License-Identifier: Apache-2.0
"""Slots in this process and in Ray actors: equal results, isolation, clear errors for crashes, deaths and hangs."""

import os
import time
from typing import Any

import pytest

from agent_system.environments.ray_vector_env import RayVectorEnv, default_num_workers
from agent_system.environments.vector_env import (
    EnvironmentFailure,
    LocalVectorEnv,
    TextEnv,
    VectorEnv,
    WorkerResources,
    make_vector_env,
)
from tests.helpers.toy_env import TOY_TASKS, ToyEnv, TroubleEnv
from verl.utils.errors import UserError

TASKS = [TOY_TASKS[i % 3] for i in range(5)]


def play(envs: VectorEnv) -> list[Any]:
    """A script that resets twice and steps subsets in odd orders."""
    log: list[Any] = [envs.reset(TASKS)]
    log.append(envs.step([4, 0, 2], ["open the blue door", "open the red door", "look"]))
    log.append(envs.step([0, 1], ["take the red key", "open the red door"]))
    log.append(envs.step([3, 2, 1, 4], ["go back", "open the green door", "go back", "take the blue key"]))
    log.append(envs.reset(TASKS[3:]))
    log.append(envs.step([1], ["open the blue door"]))
    return log


def test_script_in_this_process() -> None:
    log = play(LocalVectorEnv(ToyEnv, 5))
    assert log[0][0] == ["You are in the hall."] * 5
    assert log[1][0] == ["You are in the room.", "You are in the room.", "Nothing happens."]
    assert log[2][:3] == (["You are in the vault.", "You are in the pit."], [10.0, 0.0], [True, False])
    assert [info["won"] for info in log[3][3]] == [False, False, False, True]
    assert log[5][0] == ["You are in the room."]


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_results_do_not_depend_on_the_actors(ray_session: Any, num_workers: int) -> None:
    envs = RayVectorEnv(ToyEnv, 5, num_workers)
    try:
        assert play(envs) == play(LocalVectorEnv(ToyEnv, 5))
    finally:
        envs.close()
        envs.close()


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_crash_names_slot_and_task(ray_session: Any, kind: str) -> None:
    envs: VectorEnv = LocalVectorEnv(TroubleEnv, 3) if kind == "local" else RayVectorEnv(TroubleEnv, 3, 2)
    envs.reset(TASKS[:3])
    with pytest.raises(EnvironmentFailure, match=r"slot 1, task toy-blue: step\('crash'\).*ZeroDivisionError: by hand"):
        envs.step([0, 1], ["look", "crash"])
    with pytest.raises(UserError, match=r"^the game file x is unreadable; remove it$"):
        envs.reset([TASKS[0], {"name": "unreadable"}])
    envs.close()


def test_a_dead_actor_is_an_error_that_names_the_tasks(ray_session: Any) -> None:
    envs = RayVectorEnv(TroubleEnv, 4, 2, timeout_s=60)
    envs.reset(TASKS[:4])
    start = time.monotonic()
    with pytest.raises(
        EnvironmentFailure, match=r"actor 1 of 2 died during step \(slot 2: toy-green, slot 3: toy-red\), 3 times"
    ):
        envs.step([0, 2, 3], ["look", "die", "look"])
    assert time.monotonic() - start < 30
    envs.close()
    # After close the slots can be used again, in new actors.
    assert envs.reset(TASKS[:4])[0] == ["You are in the hall."] * 4
    envs.close()


def test_a_hung_actor_times_out_with_a_message(ray_session: Any) -> None:
    envs = RayVectorEnv(TroubleEnv, 2, 2, timeout_s=60)
    envs.reset(TASKS[:2])
    envs._timeout_s = 1.0
    with pytest.raises(
        EnvironmentFailure,
        match=r"actor 0 of 2 did not answer step within 1 s: slot 0, task toy-red, has been in step\('hang'\)",
    ):
        envs.step([0, 1], ["hang", "look"])
    envs.close()


def test_actors_that_cannot_be_placed_time_out_and_say_so(ray_session: Any) -> None:
    envs = RayVectorEnv(ToyEnv, 2, 2, WorkerResources(num_cpus=10_000), timeout_s=1.0)
    with pytest.raises(EnvironmentFailure, match=r"ask for 20000 CPUs in all \(env.resources_per_worker"):
        envs.reset(TASKS[:2])
    envs.close()


@pytest.mark.parametrize(
    ("slots", "actions", "message"),
    [
        ([0, 0], ["look", "look"], "distinct slot"),
        ([0], ["look", "look"], "distinct slot"),
        ([2], ["look"], "slot 2 has no episode"),
        ([-1], ["look"], "slot -1 has no episode"),
    ],
)
def test_bad_slots(slots: list[int], actions: list[str], message: str) -> None:
    envs = LocalVectorEnv(ToyEnv, 3)
    envs.reset(TASKS[:2])
    with pytest.raises(ValueError, match=message):
        envs.step(slots, actions)
    with pytest.raises(ValueError, match="5 tasks for 3"):
        envs.reset(TASKS)


def test_many_resets_keep_files_and_environments_constant() -> None:
    made: list[TextEnv] = []

    def factory() -> TextEnv:
        made.append(ToyEnv())
        return made[-1]

    envs = LocalVectorEnv(factory, 2)
    for _ in range(200):
        envs.reset(TASKS[:2])
    assert len(made) == 2


def test_choice_of_the_kind() -> None:
    assert isinstance(make_vector_env(ToyEnv, 2, 0, WorkerResources()), LocalVectorEnv)
    envs = make_vector_env(ToyEnv, 40, 3, WorkerResources())
    assert isinstance(envs, RayVectorEnv) and envs.num_workers == 3
    assert [len(block) for block in envs._blocks] == [13, 13, 14]
    assert 1 <= default_num_workers(1) <= default_num_workers(1000) <= (os.cpu_count() or 1)
