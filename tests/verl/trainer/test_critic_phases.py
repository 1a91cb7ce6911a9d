# SPDX-License-Identifier: Apache-2.0
"""The value model in the training program, around fakes: phases, warm-up, checkpoints, resampling, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl.trainer import fakes
from tests.verl.trainer.fake_run import Run, config_for
from verl.protocol import DataProto
from verl.trainer.config.schema import PPOConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import CRITIC_COLUMNS, UPDATE_COLUMNS, check_algorithm
from verl.utils.errors import UserError

CRITIC = "algorithm.adv_estimator=test_values"
SIZES = ("critic.ppo_micro_batch_size_per_gpu=4", "critic.ppo_mini_batch_size=16")


@pytest.fixture(autouse=True)
def values_estimator() -> Iterator[None]:
    """Advantage = reward of the row minus the value of each position."""

    @core_algos.register_adv_est("test_values", needs_critic=True)
    def estimate(batch: DataProto, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rewards = batch.batch["token_level_rewards"].sum(-1, keepdim=True)
        mask = batch.batch["response_mask"]
        return (rewards - batch.batch["values"]) * mask, rewards.expand(mask.shape).clone()

    yield
    del core_algos.ADV_ESTIMATOR_REGISTRY["test_values"]


def critic_config(folder: Path, *overrides: str) -> PPOConfig:
    return config_for(folder, CRITIC, *SIZES, *overrides)


def test_phases_and_columns(tmp_path: Path) -> None:
    run = Run(critic_config(tmp_path, "trainer.total_epochs=1"), hook=True).go()
    assert fakes.FakePolicy.log == [
        "critic init_model", "init_model", "start_rollout 1", "end_rollout",
        "compute_log_prob", "compute_values", "update_critic", "update_actor",
    ]  # fmt: skip
    assert "values" in run.hook.seen["after_log_prob"]
    assert run.critic.columns == [set(CRITIC_COLUMNS)]
    assert run.policy.columns == [set(UPDATE_COLUMNS)]
    line = run.lines()[0]
    assert line["critic/vf_loss"] == run.critic.value != 0.0
    assert line["critic/values/max"] == pytest.approx(0.2) and line["critic/vf_explained_var"] <= 1.0
    assert {"timing_s/values", "timing_s/update_critic", "timing_per_token_ms/update_critic"} <= set(line)


def test_the_actor_waits_for_the_warmup(tmp_path: Path) -> None:
    run = Run(critic_config(tmp_path, "trainer.critic_warmup=3", "trainer.total_epochs=4")).go()
    lines = run.lines()
    assert [("critic/vf_loss" in line, "actor/pg_loss" in line) for line in lines] == [
        (True, False), (True, False), (True, True), (True, True),
    ]  # fmt: skip
    # Each schedule ends with the run.
    optim = run.trainer.config.actor_rollout_ref.actor.optim
    assert optim.total_training_steps == 2
    assert run.trainer.config.critic.optim.total_training_steps == 4


def test_resume_with_the_critic(tmp_path: Path) -> None:
    more = ("trainer.save_freq=2", "trainer.critic_warmup=2")
    straight = Run(critic_config(tmp_path / "a", *more)).go()
    Run(critic_config(tmp_path / "b", *more, "trainer.total_training_steps=2")).go()
    second = Run(critic_config(tmp_path / "b", *more)).go()
    assert second.critic.value == straight.critic.value != 0.0 and second.weight == straight.weight != 0.0
    assert sorted(path.name for path in (second.folder / "global_step_4").iterdir()) == [
        "actor", "critic", "trainer_state.json",
    ]  # fmt: skip


def test_critic_checkpoints_rotate_on_their_own(tmp_path: Path) -> None:
    keep = ("trainer.save_freq=1", "trainer.max_critic_ckpt_to_keep=1", "trainer.max_actor_ckpt_to_keep=2")
    run = Run(critic_config(tmp_path, *keep)).go()
    folders = {path.name: sorted(p.name for p in path.iterdir()) for path in run.folder.glob("global_step_*")}
    assert folders == {"global_step_3": ["actor"], "global_step_4": ["actor", "critic", "trainer_state.json"]}


def test_a_checkpoint_without_critic_is_refused(tmp_path: Path) -> None:
    Run(config_for(tmp_path, "trainer.save_freq=1", "trainer.total_epochs=1")).go()
    with pytest.raises(UserError, match=r"holds no critic.*adv_estimator"):
        Run(critic_config(tmp_path)).go()


def test_sizes_of_the_critic_are_checked_for_any_estimator_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"critic.ppo_micro_batch_size_per_gpu"):
        check_algorithm(config_for(tmp_path, CRITIC))
    with pytest.raises(UserError, match=r"critic.checkpoint.contents"):
        check_algorithm(critic_config(tmp_path, "critic.checkpoint.contents=[model]"))


def test_both_updates_see_the_same_balanced_rows(tmp_path: Path) -> None:
    balanced = Run(critic_config(tmp_path / "a", "trainer.total_epochs=1")).go()
    plain = Run(critic_config(tmp_path / "b", "trainer.total_epochs=1", "trainer.balance_batch=False")).go()
    for run in (balanced, plain):
        assert run.critic.rows == run.policy.rows
    assert sorted(balanced.policy.rows[0]) == sorted(plain.policy.rows[0])
    assert "global_seqlen/balanced_max" in balanced.lines()[0]
    assert not any(name.startswith("global_seqlen") for name in plain.lines()[0])


def test_resampling_by_reward(tmp_path: Path) -> None:
    """The updates see drawn rows, the same in every run of a seed; metrics stay those of the real rows."""
    runs = []
    for folder in ("a", "b"):
        config = critic_config(tmp_path / folder, "trainer.total_epochs=2", "algorithm.use_pf_ppo=True")
        runs.append(Run(config).go())
    one, other = runs
    assert one.policy.rows == other.policy.rows == one.critic.rows
    drawn = one.policy.rows[0]
    assert len(drawn) == 16 and len(set(drawn)) < 16
    assert one.policy.rows[0] != one.policy.rows[1]
    assert one.lines()[0]["episode/count"] == 8
