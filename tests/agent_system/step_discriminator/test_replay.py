# SPDX-License-Identifier: Apache-2.0
"""Ablation by snapshots and memo equals replaying everything from the start; minimal successes are minimal."""

from __future__ import annotations

import functools
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_credit_game import (
    ACTIONS,
    PLAN,
    SHOP_ACTIONS,
    ToyGame,
    ToyShop,
    random_success,
    shop_score,
    toy_reveals,
    toy_trajectory,
)

from agent_system.step_discriminator.trajectory_analyzer import (
    CreditOptions,
    CreditRecord,
    EnvAdapter,
    Replayer,
    label_trajectories,
)
from agent_system.step_discriminator.trajectory_analyzer.label import TrajectoryJob, label_job
from agent_system.step_discriminator.trajectory_analyzer.minimal import evolve
from agent_system.step_discriminator.trajectory_analyzer.replay import replay_naively
from verl.utils.errors import UserError

TOY = EnvAdapter(make_game=ToyGame, reveals=toy_reveals)
WALKS = st.lists(st.sampled_from(ACTIONS), max_size=14)


def label(actions, **options):
    return label_trajectories([toy_trajectory(actions)], TOY, options=CreditOptions(**options))[0]


def without(actions, removed):
    return [action for index, action in enumerate(actions) if index not in removed]


def check_against_naive(actions: list[str]) -> None:
    game = ToyGame()
    replayer = Replayer(game, actions)
    cut = list(replayer.original.actions)
    assert (replayer.original.success, len(cut)) == replay_naively(ToyGame(), actions)
    naive_steps = len(cut)
    for index in range(len(cut)):
        expected = replay_naively(ToyGame(), without(cut, {index}))
        got = replayer.without((index,))
        assert (got.success, got.steps) == expected
        naive_steps += expected[1]
    assert replayer.env_steps_naive == naive_steps
    assert replayer.env_steps_used == game.steps_taken <= naive_steps
    assert replayer.replays == len(cut) + 1


@settings(max_examples=150, deadline=None)
@given(WALKS)
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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(SHOP_ACTIONS), max_size=10), st.sampled_from([0.2, 0.5, 0.7, 1.0]))
def test_with_a_threshold_the_final_score_may_not_fall(actions, threshold):
    replayer = Replayer(ToyShop(), actions, shop_score, threshold)
    original = replayer.original
    cut = list(original.actions)
    assert (original.success, len(cut)) == replay_naively(ToyShop(), actions, shop_score, threshold)
    bar = original.score if original.success else threshold
    assert bar >= threshold
    for index in range(len(cut)):
        got = replayer.without((index,))
        assert (got.success, got.steps) == replay_naively(ToyShop(), without(cut, {index}), shop_score, bar)


def minimal_by_brute_force(make_game, actions, *test) -> None:
    """Nothing that a user could try by hand shortens it: no step, no pair, no run of neighbours."""
    total = len(actions)
    assert replay_naively(make_game(), actions, *test) == (True, total)
    removals = [{index} for index in range(total)] + [set(pair) for pair in combinations(range(total), 2)]
    removals += [set(range(a, b)) for a in range(total) for b in range(a + 3, total + 1)]
    for removed in removals:
        assert not replay_naively(make_game(), without(actions, removed), *test)[0], removed


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.tuples(st.integers(0, 30), st.sampled_from(ACTIONS)), max_size=12))
def test_minimal_success_has_no_removable_step_pair_or_run(seed, extra):
    actions = random_success(seed, noise=0.3)
    for place, action in extra:
        actions.insert(min(place, len(actions)), action)
    replayer = Replayer(ToyGame(), actions)
    if not replayer.original.success:
        return
    evolved = evolve(replayer, joint=True)
    assert list(evolved.indices) == sorted(set(evolved.indices))
    assert not evolved.undone & set(evolved.indices)
    minimal_by_brute_force(ToyGame, [replayer.original.actions[index] for index in evolved.indices])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(SHOP_ACTIONS), max_size=12), st.sampled_from([0.2, 0.7]))
def test_minimal_success_keeps_the_final_score(actions, threshold):
    replayer = Replayer(ToyShop(), actions, shop_score, threshold)
    if replayer.original.success:
        kept = evolve(replayer, joint=True).indices
        cut = [replayer.original.actions[index] for index in kept]
        minimal_by_brute_force(ToyShop, cut, shop_score, replayer.original.score)


@pytest.mark.parametrize("seed", range(40))
def test_without_pairs_no_single_step_can_go(seed):
    replayer = Replayer(ToyGame(), random_success(seed))
    if not replayer.original.success:
        return
    actions = [replayer.original.actions[index] for index in evolve(replayer, joint=False).indices]
    assert replay_naively(ToyGame(), actions) == (True, len(actions))
    assert not any(replay_naively(ToyGame(), without(actions, {index}))[0] for index in range(len(actions)))


def test_steps_that_are_each_necessary_go_as_a_pair():
    """A bag that is put in, taken out and put in again: without one of the three the score falls."""
    actions = ("click b", "option", "bag", "note", "bag", "bag", "buy")
    shop = EnvAdapter(ToyShop, score=shop_score)
    job = TrajectoryJob("t", {}, True, 1.0, actions)
    record = label_job(job, shop, CreditOptions(mode="minimal"))
    assert [step.credit for step in record.steps] == [1, 1, 1, 0, 1, 1, 1]
    assert len(record.evolved_indices) == 4 and {0, 1, 6} < set(record.evolved_indices)
    assert [step.in_minimal for step in record.steps].count(True) == 4 and record.redundancy == 1 / 7
    by_minimal = label_job(job, shop, CreditOptions(mode="minimal", label_source="minimal"))
    assert [bool(step.credit) for step in by_minimal.steps] == [step.in_minimal for step in record.steps]
    assert by_minimal.redundancy == 3 / 7 and by_minimal.evolved_indices == record.evolved_indices
    assert by_minimal.kinds() == {"exploration": 0, "no_effect": 1, "undone": 2, "other": 0}
    assert len(label_job(job, shop, CreditOptions()).evolved_indices) == 6


def test_take_and_put_back_go_together():
    actions = ["go blue", "take pen", "put pen", *PLAN]
    record = label(actions, mode="minimal", label_source="minimal")
    assert record.evolved_indices == tuple(range(3, len(actions)))
    # The put is necessary alone, as the pen would stay in the hand.
    assert [step.necessary_single for step in record.steps[:3]] == [False, False, True]
    assert [step.redundancy_kind for step in record.steps[:3]] == ["exploration", "undone", "undone"]
    assert all(step.in_minimal is None for step in label(actions).steps)


def test_plan_alone_is_all_necessary():
    for options in ({}, {"mode": "minimal", "label_source": "minimal"}):
        record = label(PLAN, **options)
        assert record.status == "labelled" and record.succeeded and record.final_score == 1.0
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
    record = label_trajectories([toy_trajectory(actions)], EnvAdapter(ToyGame))[0]
    assert [(step.step_index, step.redundancy_kind) for step in record.steps if step.credit == 0] == [(2, "undone")]


def test_a_place_shown_by_the_opening_text_is_nothing_new():
    def named(action: str, observation: str) -> str | None:
        return observation if "box" in observation or not action else None

    actions = ["go blue", "go red", *PLAN[1:]]
    kinds = []
    for opening in ("You are at the door.", "You are at the blue box."):

        class Game(ToyGame):
            def reset(self, opening=opening):
                return opening, super().reset()[1]

        record = label_trajectories([toy_trajectory(actions)], EnvAdapter(Game, named))[0]
        kinds.append(record.steps[0].redundancy_kind)
    assert kinds == ["exploration", "undone"]


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
    record = label_trajectories([lying], TOY)[0]
    assert record.status == "not_reproducible" and record.steps == () and "did not succeed" in str(record.reason)
    changed = toy_trajectory(PLAN, things={"apple": "red", "pen": "blue"})
    changed.task["things"] = {"apple": "blue", "pen": "red"}
    assert label_trajectories([changed], TOY)[0].status == "not_reproducible"


def test_failed_trajectories_are_skipped_unless_asked_for():
    failing = [*PLAN[:-1], "close green", "put apple"]
    assert label(failing).status == "failed"
    for mode in ("single", "minimal"):
        record = label(failing, label_failed=True, mode=mode, label_source=mode)
        assert record.status == "labelled" and record.evolved_indices is None and not record.succeeded
        assert [failing[step.step_index] for step in record.steps if step.credit == 0] == ["close green"]


@pytest.mark.parametrize(
    ("threshold", "status", "redundant"),
    [(1.0, "failed", []), (0.7, "labelled", ["click a", "click back", "note"]), (0.75, "failed", [])],
)
def test_recorded_score_decides_whether_an_episode_counts(threshold, status, redundant):
    actions = ("click a", "click back", "click b", "note", "option", "buy")
    shop = EnvAdapter(ToyShop, lambda action, page: page, shop_score)
    job = TrajectoryJob("t", {}, False, 0.7, actions)
    record = label_job(job, shop, CreditOptions(success_threshold=threshold, mode="minimal", label_source="minimal"))
    assert record.status == status
    assert [actions[step.step_index] for step in record.steps if step.credit == 0] == redundant
    if redundant:
        assert record.succeeded and record.final_score == pytest.approx(0.7)
        kinds = [step.redundancy_kind for step in record.steps if step.credit == 0]
        assert kinds == ["exploration", "undone", "no_effect"]


def test_game_that_cannot_be_built_is_reported_not_dropped():
    def factory(task):
        raise UserError("no such game")

    record = label_trajectories([toy_trajectory(PLAN)], EnvAdapter(factory))[0]
    assert record.status == "unreadable_game" and record.reason == "no such game"


def test_empty_trajectory_is_not_reproducible():
    assert label_trajectories([toy_trajectory([], success=True)], TOY)[0].status == "not_reproducible"


def test_a_cheap_identity_gives_the_same_records():
    identity = EnvAdapter(ToyGame, toy_reveals, state_id=ToyGame.snapshot)
    counted = []

    def counting(game):
        counted.append(1)
        return game.snapshot()

    trajectories = [toy_trajectory(random_success(seed)) for seed in range(20)]
    options = CreditOptions(mode="minimal")
    expected = label_trajectories(trajectories, TOY, options=options)
    assert label_trajectories(trajectories, identity, options=options) == expected
    counting_adapter = EnvAdapter(ToyGame, toy_reveals, state_id=functools.partial(counting))
    assert label_trajectories(trajectories, counting_adapter, options=options) == expected and counted


def test_record_survives_json():
    record = label(random_success(3), mode="minimal")
    assert CreditRecord.from_dict(record.as_dict()) == record


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode=both"),
        ({"label_source": "none"}, "label_source=none"),
        ({"label_source": "minimal"}, "set mode=minimal too"),
        ({"mode": "minimal", "evolve": False}, "cannot be switched off"),
        ({"success_threshold": 0.0}, "success_threshold=0.0"),
        ({"success_threshold": 1.5}, "success_threshold=1.5"),
        ({"success_threshold": float("nan")}, "success_threshold=nan"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        CreditOptions(**options)
