# SPDX-License-Identifier: Apache-2.0
"""Several generation batches of one step: no shared uid, no shared seed, and merged as if they were one rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agent_system.multi_turn_rollout import RolloutResult, TrajectoryCollector
from agent_system.multi_turn_rollout.result import merge_results
from tests.helpers.fake_actor import FakeActorGroup, choose_command
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import TOY_TASKS, toy_manager

TASKS, MEMBERS = 2, 3


@pytest.fixture(scope="module")
def collector() -> TrajectoryCollector:
    return TrajectoryCollector(rollout_config(max_steps=4), make_tiny_tokenizer())


def play(
    collector: TrajectoryCollector, manager: Any, generation: int, step: int = 1
) -> tuple[RolloutResult, set[int]]:
    actor = FakeActorGroup(make_tiny_tokenizer(), choose_command)
    result = collector.multi_turn_loop(
        manager, actor, step=step, num_tasks=TASKS, group_size=MEMBERS, generation=generation
    )
    return result, {seed for request in actor.requests for seed in request.batch["sampling_seed"].tolist()}


def test_uids_count_on_and_seeds_differ(collector: TrajectoryCollector) -> None:
    # One task only: both batches play it, and still no two episodes of the step share a seed.
    manager = toy_manager(TASKS * MEMBERS, tasks=TOY_TASKS[:1])
    (first, seeds), (second, others) = play(collector, manager, 0), play(collector, manager, 1)
    assert [e.traj_uid for e in second.episodes] == [f"s1-g{g}-m{m}" for g in (2, 3) for m in range(MEMBERS)]
    assert not {e.traj_uid for e in first.episodes} & {e.traj_uid for e in second.episodes}
    assert not seeds & others
    again, same = play(collector, toy_manager(TASKS * MEMBERS, tasks=TOY_TASKS[:1]), 0)
    assert again.episodes == first.episodes and same == seeds


def test_merged_rows_are_the_chosen_groups_and_metrics_are_over_everything(collector: TrajectoryCollector) -> None:
    manager = toy_manager(TASKS * MEMBERS)
    parts = [play(collector, manager, generation)[0] for generation in range(3)]
    uids = {"s1-g1", "s1-g4", "s1-g5"}
    merged = collector.merge(parts, uids)
    assert list(dict.fromkeys(merged.batch.non_tensor_batch["uid"])) == sorted(uids)
    assert [e.uid for e in merged.episodes] == [uid for uid in sorted(uids) for _ in range(MEMBERS)]
    expected = [part.batch.batch["input_ids"][np.isin(part.batch.non_tensor_batch["uid"].astype(str), sorted(uids))]
                for part in parts]  # fmt: skip
    assert torch.equal(merged.batch.batch["input_ids"], torch.cat(expected))
    assert len(merged.batch) == sum(len(e.steps) for e in merged.episodes)
    episodes = [e for part in parts for e in part.episodes]
    rate = np.mean([e.success for e in episodes])
    assert 0 < rate < 1
    assert merged.metrics["episode/success_rate"] == pytest.approx(rate)
    assert set(merged.batch.non_tensor_batch["success_rate"]) == {merged.metrics["episode/success_rate"]}
    assert merged.metrics["rollout/num_episodes"] == len(episodes)
    assert merged.metrics["rollout/num_rows"] == sum(len(e.steps) for e in episodes)
    assert merged.metrics["rollout/num_turns"] == max(len(e.steps) for e in episodes)
    assert merged.metrics["episode/truncated_ratio"] == pytest.approx(np.mean([e.truncated for e in episodes]))
    assert merged.metrics["episode/admissible_action_ratio"] == 1.0
    assert merged.metrics["rollout/occupancy/turn_1"] == 1.0 > merged.metrics["rollout/occupancy/mean"] > 0.5
    assert merged.metrics.keys() == parts[0].metrics.keys()


def test_success_keys_that_only_some_batches_have(collector: TrajectoryCollector) -> None:
    """A task type may be missing from a batch: its rate is over the episodes that have it."""
    parts = [play(collector, toy_manager(TASKS * MEMBERS), generation)[0] for generation in range(2)]
    part = parts[1]
    values = np.array([1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    part.batch.non_tensor_batch["rare_success_rate"] = np.full(len(part.batch), 0.25, dtype=object)
    parts[1] = RolloutResult(part.batch, part.episodes, part.metrics, {**part.success, "rare_success_rate": values})
    merged = merge_results(parts, {"s1-g0", "s1-g3"})
    assert set(merged.batch.non_tensor_batch["rare_success_rate"]) == {0.25}
    assert merged.metrics["episode/rare_success_rate"] == 0.25
    with pytest.raises(ValueError, match="no row belongs"):
        merge_results(parts, {"s9-g0"})
