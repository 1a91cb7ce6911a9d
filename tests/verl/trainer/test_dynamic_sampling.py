# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: whole groups, trimmed to the target, several generation batches, fillers, hooks first, resume."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from tests.verl.trainer import fakes
from tests.verl.trainer.fake_run import Run, config_for
from verl.protocol import DataProto
from verl.trainer.config.algorithm_sections import FilterGroupsConfig
from verl.trainer.config.schema import validate_ppo_config
from verl.trainer.ppo.dynamic_sampling import GroupSampler, episode_values
from verl.trainer.ppo.recipes import TrainerContext
from verl.utils.errors import UserError

ON = ("algorithm.filter_groups.enable=True", "data.train_batch_size=4", "env.rollout.n=2")


def rows(groups: dict[str, list[float]], **columns: list[float]) -> DataProto:
    """One row an episode."""
    values = {
        "uid": [uid for uid, rewards in groups.items() for _ in rewards],
        "episode_rewards": [reward for rewards in groups.values() for reward in rewards],
        **columns,
    }
    return DataProto.from_dict({}, {name: np.array(column, dtype=object) for name, column in values.items()})


def sampler(target: int, tries: int = 10, metric: str | None = None) -> GroupSampler:
    return GroupSampler(target, FilterGroupsConfig(True, tries, metric), step=3)


def test_kept_groups_are_whole_in_order_and_no_more_than_the_target() -> None:
    chooser = sampler(3)
    chooser.add(rows({"a": [0, 10], "b": [10, 10], "c": [0, 0, 10]}))
    assert not chooser.is_done
    chooser.add(rows({"d": [10, 0], "e": [0, 10], "f": [0, 0]}))
    assert chooser.is_done and chooser.chosen() == {"a", "c", "d"}
    assert chooser.metrics() == {
        "dynamic_sampling/generation_batches": 2, "dynamic_sampling/groups_generated": 6,
        "dynamic_sampling/groups_kept": 4, "dynamic_sampling/groups_trained": 3, "dynamic_sampling/groups_filled": 0,
    }  # fmt: skip


def test_after_the_last_try_the_latest_equal_groups_fill_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    chooser = sampler(3, tries=2)
    chooser.add(rows({"a": [0, 0], "b": [0, 10], "c": [0, 0]}))
    # What is not among these will not be needed: it is given up before the next batch is played.
    assert chooser.chosen() == {"a", "b", "c"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    chooser.add(rows({"d": [0, 0], "e": [0, 0], "f": [0, 0]}))
    assert chooser.is_done and chooser.chosen() == {"b", "e", "f"}
    assert "1 of 3 groups have episodes that differ after 2 generation batches" in caplog.text
    nothing = sampler(2, tries=1)
    nothing.add(rows({"a": [0, 0], "b": [10, 10]}))
    assert nothing.is_done and nothing.chosen() == {"a", "b"}
    assert nothing.metrics()["dynamic_sampling/groups_filled"] == 2


@pytest.mark.parametrize("tries", [0, -1])
def test_without_a_limit_it_goes_on_and_says_so(tries: int, caplog: pytest.LogCaptureFixture) -> None:
    chooser = sampler(1, tries=tries)
    for number in range(25):
        assert not chooser.is_done
        chooser.add(rows({f"g{number}": [10, 10]}))
    assert caplog.text.count("never gives up") == 2
    chooser.add(rows({"last": [0, 10]}))
    assert chooser.is_done and chooser.chosen() == {"last"}


def test_what_has_to_differ() -> None:
    shaped = rows({"a": [10, 10]}, shaped_episode_rewards=[10.0, 7.5], acc=[1.0, 2.0], length=[3.0, 3.0])
    assert episode_values(shaped, None).tolist() == episode_values(shaped, "acc").tolist() == [10.0, 7.5]
    assert episode_values(shaped, "length").tolist() == [3.0, 3.0]
    assert episode_values(rows({"a": [1, 2]}), "seq_reward").tolist() == [1.0, 2.0]
    with pytest.raises(UserError, match=r"filter_groups.metric=speed.*length"):
        episode_values(shaped, "speed")
    # Float noise is no difference.
    noisy = sampler(1, tries=1)
    noisy.add(rows({"a": [0.1 + 0.2, 0.3]}))
    assert noisy.metrics()["dynamic_sampling/groups_kept"] == 0


def test_groups_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"env.rollout.n=1 makes groups of one"):
        validate_ppo_config(config_for(tmp_path, *ON, "env.rollout.n=1", "actor_rollout_ref.rollout.name=hf"))


def trained_uids(run: Run) -> list[list[str]]:
    """Groups that reached the advantages, per step."""
    return [list(dict.fromkeys(uids)) for uids in run.hook.uids]


def test_a_step_generates_until_there_are_enough_groups(tmp_path: Path) -> None:
    # Of every four tasks three are dull, so four groups take four batches.
    collector = fakes.FakeCollector(dull=lambda task: task % 4 != 0)
    run = Run(config_for(tmp_path, *ON, "trainer.total_epochs=2"), hook=True, collector=collector).go()
    assert run.envs.played == list(range(32))
    assert trained_uids(run) == [[f"s{step}-g{g}" for g in (0, 4, 8, 12)] for step in (1, 2)]
    assert run.hook.calls.count("1 after_rollout") == 4 and run.hook.calls.count("1 after_log_prob") == 1
    assert run.hook.num_rows[:5] == [16, 16, 16, 16, 16]
    first = run.lines()[0]
    assert first["dynamic_sampling/generation_batches"] == 4 and first["dynamic_sampling/groups_generated"] == 16
    assert first["rollout/num_rows"] == 64 and first["episode/count"] == 8 and first["episode/reward/mean"] == 5.0
    assert first["timing_s/gen"] > 0.0 and first["timing_s/after_rollout"] > 0.0


def test_one_sync_serves_a_step_unless_hooks_need_the_devices(tmp_path: Path) -> None:
    for hook, syncs in ((False, 1), (True, 4)):
        collector = fakes.FakeCollector(dull=lambda task: task % 4 != 0)
        fakes.FakePolicy.log.clear()
        config = config_for(tmp_path / str(hook), *ON, "trainer.total_epochs=1")
        Run(config, hook=hook, collector=collector).go()
        log = [entry for entry in fakes.FakePolicy.log if "rollout" in entry]
        assert log[: 2 * syncs] == ["start_rollout 1", "end_rollout"] * syncs
        assert not any(entry == "start_rollout 1" for entry in log[2 * syncs :])


def test_all_equal_groups_still_give_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(tmp_path, *ON, "algorithm.filter_groups.max_num_gen_batches=2", "trainer.total_epochs=1")
    with caplog.at_level(logging.WARNING):
        run = Run(config, hook=True, collector=fakes.FakeCollector(dull=lambda task: True)).go()
    assert trained_uids(run) == [[f"s1-g{g}" for g in (4, 5, 6, 7)]]
    assert "0 of 4 groups" in caplog.text and run.lines()[0]["dynamic_sampling/groups_filled"] == 4


class Shaper(fakes.RecordingHook):
    """Makes the episodes of every group differ."""

    def after_rollout(self, ctx: TrainerContext, batch: DataProto) -> None:
        super().after_rollout(ctx, batch)
        members = [float(uid.rsplit("m", 1)[1]) for uid in batch.non_tensor_batch["traj_uid"]]
        batch.non_tensor_batch["shaped_episode_rewards"] = np.array(members)


def test_shaped_rewards_decide_what_is_kept(tmp_path: Path) -> None:
    config = config_for(tmp_path, *ON, "trainer.total_epochs=1")
    run = Run(config, collector=fakes.FakeCollector(dull=lambda task: True))
    hook = Shaper(config)
    run.trainer.hooks = (hook,)
    run.go()
    assert run.lines()[0]["dynamic_sampling/generation_batches"] == 1
    assert run.lines()[0]["dynamic_sampling/groups_filled"] == 0


def test_resume_equals_the_straight_run(tmp_path: Path) -> None:
    def go(folder: str, *overrides: str) -> Run:
        config = config_for(tmp_path / folder, *ON, "trainer.save_freq=2", *overrides)
        return Run(config, hook=True, collector=fakes.FakeCollector(dull=lambda task: task % 3 == 0)).go()

    straight = go("a")
    first = go("b", "trainer.total_training_steps=2")
    second = go("b")
    assert first.envs.played + second.envs.played == straight.envs.played
    assert trained_uids(first) + trained_uids(second) == trained_uids(straight)
    assert second.weight == straight.weight != 0.0
    keep = ("actor/pg_loss", "dynamic_sampling/generation_batches", "dynamic_sampling/groups_kept")
    assert [[line[k] for k in keep] for line in straight.lines()] == [[x[k] for k in keep] for x in second.lines()]


def test_without_filtering_nothing_is_dropped(tmp_path: Path) -> None:
    config = config_for(tmp_path, "data.train_batch_size=4", "env.rollout.n=2", "trainer.total_epochs=1")
    run = Run(config, hook=True, collector=fakes.FakeCollector(dull=lambda task: True)).go()
    assert trained_uids(run) == [[f"s1-g{g}" for g in range(4)]]
    assert not any(name.startswith("dynamic_sampling/") for name in run.lines()[0])
