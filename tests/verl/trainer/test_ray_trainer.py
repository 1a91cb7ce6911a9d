# SPDX-License-Identifier: Apache-2.0
"""The trainer's program around fakes: order of phases and hooks, validation, resume, files, refusals."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.verl.trainer import fakes
from tests.verl.trainer.fake_run import Run, config_for
from verl.trainer.ppo.checkpointing import STATE_FILE
from verl.utils.errors import UserError


def test_phases_and_hooks_run_in_the_documented_order(tmp_path: Path) -> None:
    config = config_for(
        tmp_path, "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
    )  # fmt: skip
    run = Run(config, steps_per_epoch=2, hook=True).go()
    names = ["after_rollout", "after_log_prob", "after_reward", "after_advantage"]
    expected = ["0 init_workers", *(f"1 {n}" for n in names), *(f"2 {n}" for n in names), "2 epoch_end", "close"]
    assert run.hook.calls == expected
    assert fakes.FakePolicy.log == [
        "init_model", "init_model",
        "start_rollout 1", "end_rollout", "compute_log_prob", "compute_ref_log_prob", "update_actor",
        "start_rollout 2", "end_rollout", "compute_log_prob", "compute_ref_log_prob", "update_actor",
        "start_rollout 3", "end_rollout", "save_checkpoint 2",
    ]  # fmt: skip
    assert run.validator.steps == [2] and run.hook.epochs == [1]
    assert "old_log_probs" not in run.hook.seen["after_rollout"]
    assert {"response_mask", "old_log_probs", "ref_log_prob"} <= run.hook.seen["after_log_prob"]
    assert "token_level_scores" in run.hook.seen["after_reward"]
    assert "token_level_rewards" not in run.hook.seen["after_reward"]
    assert {"advantages", "returns", "token_level_rewards"} <= run.hook.seen["after_advantage"]


def test_metrics_are_complete_finite_and_one_line_a_step(tmp_path: Path) -> None:
    run = Run(config_for(tmp_path, "trainer.total_epochs=2", "trainer.save_freq=1"), hook=True).go()
    lines = run.lines()
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in line.values()), line
        assert line["training/global_step"] == line["step"] and line["training/epoch"] == line["step"] - 1
        assert line["episode/reward/mean"] == 5.0 and line["episode/count"] == 8.0
        assert line["episode/valid_action_ratio"] == 0.5
        assert line["critic/score/max"] == pytest.approx(10.0) and line["critic/score/min"] == pytest.approx(-0.1)
        assert line["training/rollout_probs_diff_max"] == 0.0 and line["actor/entropy_loss"] == pytest.approx(0.5)
    names = ("gen", "old_log_prob", "reward", "adv", "update_actor", "save_checkpoint", "score_credit", "step")
    assert {f"timing_s/{name}" for name in names} <= set(lines[0])
    assert "timing_s/testing" not in lines[0] and "timing_s/ref" not in lines[0]


def test_resume_equals_the_straight_run(tmp_path: Path) -> None:
    overrides = ("trainer.save_freq=2", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive")
    straight = Run(config_for(tmp_path / "a", *overrides), hook=True).go()
    first = Run(config_for(tmp_path / "b", *overrides, "trainer.total_training_steps=2"), hook=True).go()
    second = Run(config_for(tmp_path / "b", *overrides), hook=True).go()
    assert first.envs.played + second.envs.played == straight.envs.played
    assert second.weight == straight.weight
    assert second.trainer.kl_ctrl.value == straight.trainer.kl_ctrl.value != 0.001
    assert second.hook.epochs == straight.hook.epochs == [1, 2, 3, 4]
    assert second.hook.restored == {"buffer": str(len(first.hook.calls) - 1)}
    keep = ("actor/pg_loss", "actor/reward_kl_penalty_coeff", "episode/reward/mean", "training/epoch", "step")
    pairs = zip(straight.lines(), second.lines(), strict=True)
    assert all([a[k] for k in keep] == [b[k] for k in keep] for a, b in pairs)


def test_resume_at_the_last_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(tmp_path, "trainer.save_freq=1", "trainer.total_epochs=1")
    Run(config).go()
    again = Run(config).go()
    assert "nothing is left to train" in caplog.text
    assert again.envs.played == [] and len(again.lines()) == 1


def test_kill_before_the_rename_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    config = config_for(tmp_path, "trainer.save_freq=1", "trainer.total_epochs=2", "trainer.max_actor_ckpt_to_keep=1")
    killed = Run(config)
    real_save = fakes.RecordingHook.save

    class KillingHook(fakes.RecordingHook):
        def save(self, path: Path) -> None:
            real_save(self, path)
            if len(self.epochs) == 2:
                raise KeyboardInterrupt

    killed = Run(config)
    killed.trainer.hooks = (KillingHook(config),)
    killed.trainer.init_workers()
    with pytest.raises(KeyboardInterrupt):
        killed.trainer.fit()
    assert killed.trainer.store.complete_steps() == [1]
    resumed = Run(config, hook=True).go()
    assert resumed.trainer.store.complete_steps() == [2]
    straight = Run(config_for(tmp_path / "other", "trainer.total_epochs=2"), hook=True).go()
    assert resumed.weight == straight.weight and resumed.envs.position == straight.envs.position


@pytest.mark.parametrize("before", [True, False])
def test_val_only_never_trains(tmp_path: Path, before: bool) -> None:
    run = Run(config_for(tmp_path, "trainer.val_only=True", f"trainer.val_before_train={before}")).go()
    assert run.validator.steps == [0] and run.envs.played == []
    assert run.lines()[0]["val/success_rate"] == 0.5


def test_validation_at_the_start_and_the_end(tmp_path: Path) -> None:
    run = Run(config_for(tmp_path, "trainer.val_before_train=True", "trainer.test_freq=3")).go()
    assert run.validator.steps == [0, 3, 4]


def test_validation_episodes_are_shown_to_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(
        "verl.utils.tracking.Tracking.log_generations",
        lambda self, samples, step: shown.append((step, [said for _, said, _ in samples])),
    )
    more = ("trainer.val_before_train=True", "trainer.test_freq=2", "trainer.total_epochs=2")
    Run(config_for(tmp_path / "a", *more, "trainer.log_val_generations=3")).go()
    (_, first), (_, nothing), (_, last) = shown
    assert [step for step, _ in shown] == [0, 1, 2] and nothing == []
    assert len(first) == 3 and [text.split("@")[0] for text in first] == [text.split("@")[0] for text in last]
    shown.clear()
    Run(config_for(tmp_path / "b", *more)).go()
    assert [samples for _, samples in shown] == [[], [], []]


def test_rollouts_are_dumped_as_rows_and_episodes(tmp_path: Path) -> None:
    written: dict[str, list[str]] = {}
    config = config_for(tmp_path, "trainer.total_epochs=1", f"trainer.rollout_data_dir={tmp_path}/dump")
    Run(config, save_episodes=lambda path, episodes: written.__setitem__(path.name, list(episodes))).go()
    rows = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and set(rows[0]) == {"input", "output", "score", "step"}
    assert written == {"step_1.jsonl": [f"episode s1-g{g}-m{m}" for g in range(2) for m in range(4)]}


def test_state_of_other_hooks_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(tmp_path, "trainer.save_freq=1", "trainer.total_epochs=1")
    Run(config, hook=True).go()
    longer = config_for(tmp_path, "trainer.save_freq=1", "trainer.total_epochs=2")
    with caplog.at_level(logging.WARNING):
        Run(longer).go()
    assert "state of recipe recording, which is not enabled" in caplog.text
    with caplog.at_level(logging.WARNING):
        Run(config_for(tmp_path, "trainer.total_epochs=3"), hook=True).go()
    assert "no state of recipe recording" in caplog.text


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, "trainer.save_freq=1", "trainer.total_epochs=1")
    run = Run(config).go()
    state = run.folder / "global_step_1" / STATE_FILE
    state.write_text(json.dumps(json.loads(state.read_text()) | {"world_size": 2}))
    with pytest.raises(UserError, match=r"2 ranks, this run has 1.*n_gpus_per_node"):
        Run(config).go()


def test_unknown_estimator_or_loss_is_refused_before_workers_start(tmp_path: Path) -> None:
    for override, name in (
        ("algorithm.adv_estimator=grpoo", "algorithm.adv_estimator"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=x", "loss_mode"),
    ):
        with pytest.raises(UserError, match=f"{name}.*known:"):
            Run(config_for(tmp_path, override))


def test_actor_is_not_updated_during_warmup(tmp_path: Path) -> None:
    run = Run(config_for(tmp_path, "trainer.critic_warmup=4")).go()
    assert fakes.FakePolicy.log.count("update_actor") == 1
    assert "actor/pg_loss" not in run.lines()[2] and "actor/pg_loss" in run.lines()[3]


def test_total_steps_reach_the_schedules(tmp_path: Path) -> None:
    run = Run(config_for(tmp_path), steps_per_epoch=5)
    assert run.trainer.total_steps == 20
    assert run.trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 20
    shorter = replace(run.trainer.config.trainer, total_training_steps=7)
    assert Run(replace(run.trainer.config, trainer=shorter), steps_per_epoch=5).trainer.total_steps == 7


def test_with_lora_the_policy_itself_is_the_reference(tmp_path: Path) -> None:
    """Adapters off: no second model, no second role."""
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=True")
    run = Run(config_for(tmp_path, *lora, "trainer.total_epochs=1")).go()
    assert set(run.trainer.worker_groups) == {"actor_rollout"}
    assert fakes.FakePolicy.log[-3:] == ["compute_log_prob", "compute_ref_log_prob", "update_actor"]
    assert "ref_log_prob" in run.policy.columns[0]


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_kl_in_the_reward(tmp_path: Path, kind: str) -> None:
    """The penalty reaches the rewards, and the adaptive controller moves by what was measured."""
    more = ("algorithm.use_kl_in_reward=True", f"algorithm.kl_ctrl.type={kind}", "algorithm.kl_ctrl.kl_coef=0.5")
    run = Run(config_for(tmp_path, *more, "algorithm.kl_ctrl.horizon=100", "trainer.total_epochs=3")).go()
    lines = run.lines()
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in lines]
    assert [line["actor/reward_kl_penalty"] for line in lines] == pytest.approx([0.5] * 3)
    # 16 rows of KL 0.5 against the target 0.1: the largest step up.
    grown = [0.5 * (1 + 0.2 * 16 / 100) ** step for step in range(3)]
    assert coefficients == pytest.approx(grown if kind == "adaptive" else [0.5] * 3)
    for line, coefficient in zip(lines, coefficients):
        # Two or three tokens a row, each penalised.
        assert line["critic/rewards/mean"] == pytest.approx(line["critic/score/mean"] - coefficient * 0.5 * 2.5)


def test_the_sampling_seed_follows_the_environments(tmp_path: Path) -> None:
    def seed(*overrides: str) -> int | None:
        return Run(config_for(tmp_path, "env.seed=7", *overrides)).trainer.config.actor_rollout_ref.rollout.seed

    assert seed() == 7 and seed("actor_rollout_ref.rollout.seed=0") == 0


def test_duplicated_rows_of_the_reference_order(tmp_path: Path) -> None:
    run = Run(
        config_for(
            tmp_path, "trainer.adjust_before_advantage=True", "trainer.total_epochs=1",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=9",
        )
    ).go()  # fmt: skip
    assert run.lines()[0]["training/duplicated_rows"] == 2
