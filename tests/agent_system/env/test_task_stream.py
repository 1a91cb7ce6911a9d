# SPDX-License-Identifier: Apache-2.0
"""Order of training tasks."""

import json

import pytest

from agent_system.environments import TaskStream
from verl.utils.errors import UserError

TASKS = [{"gamefile": f"g{i}"} for i in range(10)]


def names(tasks: list[dict]) -> list[str]:
    return [task["gamefile"] for task in tasks]


def test_every_task_once_per_permutation_in_changing_order() -> None:
    stream = TaskStream(TASKS, seed=3)
    first, second = names(stream.take(10)), names(stream.take(10))
    assert sorted(first) == sorted(second) == sorted(names(TASKS))
    assert first != second
    assert names(TaskStream(TASKS, seed=3).take(10)) == first
    assert names(TaskStream(TASKS, seed=4).take(10)) != first


def test_one_draw_has_no_task_twice() -> None:
    stream = TaskStream(TASKS, seed=0)
    for _ in range(50):
        drawn = names(stream.take(4))
        assert len(set(drawn)) == 4
    assert len(set(names(stream.take(25)))) == 10


def test_state_continues_the_order() -> None:
    straight = TaskStream(TASKS, seed=1)
    stream = TaskStream(TASKS, seed=1)
    for count in (3, 3, 3, 12):
        assert stream.take(count) == straight.take(count)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = TaskStream(TASKS, seed=1)
    resumed.load_state_dict(state)
    for count in (3, 7, 10):
        assert resumed.take(count) == straight.take(count)


def test_state_of_other_tasks_is_refused() -> None:
    state = TaskStream(TASKS, seed=1).state_dict()
    with pytest.raises(UserError, match="other tasks or another"):
        TaskStream(TASKS[:9], seed=1).load_state_dict(state)
    with pytest.raises(UserError, match="other tasks or another"):
        TaskStream(TASKS, seed=2).load_state_dict(state)


def test_tasks_are_copies() -> None:
    stream = TaskStream(TASKS, seed=0)
    stream.take(1)[0]["gamefile"] = "changed"
    assert names(stream.tasks) == names(TASKS)
