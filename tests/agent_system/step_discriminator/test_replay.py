# SPDX-License-Identifier: Apache-2.0
"""Single-step ablation by snapshots and memo equals replaying everything from the start."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_credit_game import ACTIONS, PLAN, ToyGame, random_success, toy_reveals, toy_trajectory

from agent_system.step_discriminator.trajectory_analyzer import (
    CreditOptions,
    CreditRecord,
    Replayer,
    label_trajectories,
)
from agent_system.step_discriminator.trajectory_analyzer.replay import replay_naively
from verl.utils.errors import UserError


def label(actions, **options):
    record = label_trajectories(
        [toy_trajectory(actions)], ToyGame, options=CreditOptions(**options), reveals=toy_reveals
    )[0]
    return record


def check_against_naive(actions: list[str]) -> None:
    game = ToyGame()
    replayer = Replayer(game, actions)
    cut = list(replayer.original.actions)
    assert (replayer.original.success, len(cut)) == replay_naively(ToyGame(), actions)
    naive_steps = len(cut)
    for index in range(len(cut)):
        expected = replay_naively(ToyGame(), cut[:index] + cut[index + 1 :])
        got = replayer.without(index)
        assert (got.success, got.steps) == expected
        naive_steps += expected[1]
    assert replayer.env_steps_naive == naive_steps
    assert replayer.env_steps_used == game.steps_taken <= naive_steps
    assert replayer.replays == len(cut) + 1


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=14))
def test_any_walk_equals_naive_replay(actions):
    check_against_naive(actions)


@pytest.mark.parametrize("seed", range(60))
def test_successes_with_noise_equal_naive_replay(seed):
    check_against_naive(random_success(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_any_subset_of_steps_equals_naive_replay(seed, data):
    replayer = Replayer(ToyGame(), random_success(seed))
    total = len(replayer.original.actions)
    for _ in range(8):
        kept = sorted(data.draw(st.sets(st.integers(0, total - 1))))
        expected = replay_naively(ToyGame(), [replayer.original.actions[index] for index in kept])
        got = replayer.keep(kept)
        assert (got.success, got.steps) == expected


def test_plan_alone_is_all_necessary():
    record = label(PLAN)
    assert record.status == "labelled"
    assert [step.credit for step in record.steps] == [1] * len(PLAN)
    assert record.redundancy == 0.0
    assert record.evolved_indices == tuple(range(len(PLAN)))


def test_kinds_of_redundancy():
    actions = ["look", "go blue", "take pen", "put pen", *PLAN[:3], "close red", *PLAN[3:]]
    kinds = {actions[step.step_index]: step.redundancy_kind for step in label(actions).steps if step.credit == 0}
    # Without the put the pen would still be in the hand: necessary alone, although take and put could go together.
    assert kinds == {"look": "no_effect", "go blue": "exploration", "take pen": "undone", "close red": "other"}


def test_undone_means_that_the_later_steps_reverse_it():
    actions = ["go red", "open red", "go blue", "go red", *PLAN[2:]]
    record = label_trajectories([toy_trajectory(actions)], ToyGame)[0]
    assert [(step.step_index, step.redundancy_kind) for step in record.steps if step.credit == 0] == [(2, "undone")]


def test_cut_at_first_success():
    record = label([*PLAN, "look", "go red", "take apple"])
    assert record.num_steps == len(PLAN)


@pytest.mark.parametrize("seed", range(40))
def test_last_step_is_necessary_and_evolved_trajectory_wins(seed):
    actions = random_success(seed)
    record = label(actions)
    if record.status != "labelled":
        assert record.status == "failed" and not replay_naively(ToyGame(), actions)[0]
        return
    assert record.steps[-1].credit == 1
    assert record.evolved_indices is not None and len(record.evolved_indices) <= record.num_steps
    assert replay_naively(ToyGame(), [actions[index] for index in record.evolved_indices]) == (
        True,
        len(record.evolved_indices),
    )


def test_replay_check_excludes_what_does_not_reproduce():
    lying = toy_trajectory(PLAN[:-1], success=True)
    record = label_trajectories([lying], ToyGame)[0]
    assert record.status == "not_reproducible" and record.steps == () and "did not succeed" in str(record.reason)
    changed = toy_trajectory(PLAN, things={"apple": "red", "pen": "blue"})
    changed.task["things"] = {"apple": "blue", "pen": "red"}
    assert label_trajectories([changed], ToyGame)[0].status == "not_reproducible"


def test_failed_trajectories_are_skipped_unless_asked_for():
    failing = [*PLAN[:-1], "close green", "put apple"]
    assert label(failing).status == "failed"
    record = label(failing, label_failed=True)
    assert record.status == "labelled" and record.evolved_indices is None
    assert [failing[step.step_index] for step in record.steps if step.credit == 0] == ["close green"]


def test_game_that_cannot_be_built_is_reported_not_dropped():
    def factory(task):
        raise UserError("no such game")

    record = label_trajectories([toy_trajectory(PLAN)], factory)[0]
    assert record.status == "unreadable_game" and record.reason == "no such game"


def test_empty_trajectory_is_not_reproducible():
    assert label_trajectories([toy_trajectory([], success=True)], ToyGame)[0].status == "not_reproducible"


def test_record_survives_json():
    record = label(random_success(3))
    assert CreditRecord.from_dict(record.as_dict()) == record


@pytest.mark.parametrize("field", ["mode", "label_source"])
def test_minimal_is_refused_instead_of_labelled_as_single(field):
    with pytest.raises(UserError, match=f"{field}=minimal"):
        CreditOptions(**{field: "minimal"})
