# SPDX-License-Identifier: Apache-2.0
"""Distance between the sampler and the policy: metrics, truncated importance weights, rejection."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.tiny import make_tiny_model
from tests.verl.trainer.toy_run import run_toy, toy_config, toy_trainer
from verl.protocol import DataProto
from verl.trainer.config.schema import ActorConfig, RolloutCorrectionConfig
from verl.trainer.config.validate import validate_ppo_config
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss
from verl.trainer.ppo.ray_trainer import StepState
from verl.trainer.ppo.registry import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_correction import (
    add_rollout_correction,
    correct_rows,
    importance_weights,
    kept_tokens,
    rollout_kl,
)
from verl.utils.errors import UserError
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.sampling import SamplingParams

LENGTHS = (5, 1, 3, 0)


def mask_of(lengths: tuple[int, ...] = LENGTHS, width: int = 5) -> Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).float()


def batch_of(shift: Tensor, mask: Tensor) -> DataProto:
    """Rows whose policy is ``shift`` nats above the engine."""
    generator = torch.Generator().manual_seed(1)
    old = -3.0 * torch.rand(mask.shape, generator=generator)
    return DataProto.from_dict(
        {
            "response_mask": mask.long(), "old_log_probs": old, "rollout_log_probs": old - shift,
            "advantages": torch.randn(mask.shape, generator=generator) * mask,
        }
    )  # fmt: skip


def test_weights_and_rejection_against_loops() -> None:
    mask = mask_of()
    d = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    for level in ("token", "sequence", "geometric"):
        kept = kept_tokens(d, mask, level, 0.5, 2.0)
        weights = importance_weights(d, mask, level, 2.0)
        for row, length in enumerate(LENGTHS):
            total = float(d[row, :length].sum())
            for column in range(mask.shape[1]):
                if column >= length:
                    assert weights[row, column] == 0 and not kept[row, column]
                    continue
                log_ratio = {"token": float(d[row, column]), "sequence": total, "geometric": total / length}[level]
                ratio = math.exp(log_ratio)
                assert float(weights[row, column]) == pytest.approx(min(ratio, 2.0), rel=1e-5)
                assert bool(kept[row, column]) == (0.5 <= ratio <= 2.0)


def test_weighted_samples_have_the_policy_s_expectation() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, engine = (torch.randn(6, generator=generator).log_softmax(-1) for _ in range(2))
    value = torch.randn(6, generator=generator)
    tokens = torch.multinomial(engine.exp(), 400_000, replacement=True, generator=generator)
    d = (policy - engine)[tokens][:, None]
    weights = importance_weights(d, torch.ones_like(d), "token", 1e6)[:, 0]
    assert float((weights * value[tokens]).mean()) == pytest.approx(float((policy.exp() * value).sum()), abs=0.01)
    kl = rollout_kl(d, torch.ones_like(d))
    exact = float((engine.exp() * (engine - policy)).sum())
    assert kl["rollout_corr/kl"] == pytest.approx(exact, abs=0.01)
    assert kl["rollout_corr/k3_kl"] == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_every_policy_loss_is_linear_in_the_advantages(name: str) -> None:
    mask = mask_of((5, 2, 3, 1))
    generator = torch.Generator().manual_seed(2)
    old, new, advantages = (torch.randn(mask.shape, generator=generator) for _ in range(3))
    weights = 2 * torch.rand(mask.shape, generator=generator)
    loss, config = get_policy_loss(name), ActorConfig()
    plain = loss(old, new, advantages, mask, config).per_token_loss
    weighted = loss(old, new, advantages * weights, mask, config).per_token_loss
    assert torch.allclose(weighted * mask, plain * weights * mask, atol=1e-6)


def test_columns_and_metrics() -> None:
    mask = mask_of()
    shift = torch.zeros_like(mask)
    shift[0] = 1.0
    shift[2, 0] = -0.1
    batch = batch_of(shift, mask)
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0, rollout_rs="geometric")
    metrics = add_rollout_correction(batch, config)
    # Nine tokens: five with e, cut to 2, one with exp(-0.1), three with 1.
    weights = [2.0] * 5 + [math.exp(-0.1)] + [1.0] * 3
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(np.mean(weights), rel=1e-5)
    assert metrics["rollout_corr/rollout_is_truncated_fraction"] == pytest.approx(5 / 9)
    effective = sum(weights) ** 2 / sum(w * w for w in weights) / 9
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(effective, rel=1e-5)
    assert metrics["rollout_corr/kl"] == pytest.approx((-5.0 + 0.1) / 9, rel=1e-4)
    # The first row's mean ratio is e: all of its tokens go, one of three rows with a token.
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(5 / 9)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
    before = {name: tensor.clone() for name, tensor in batch.batch.items()}
    rows = correct_rows(batch)
    assert rows.batch["response_mask"].tolist()[0] == [0] * 5
    assert torch.equal(rows.batch["response_mask"][1:], before["response_mask"][1:])
    assert rows.batch["response_mask"].dtype == before["response_mask"].dtype
    assert torch.allclose(rows.batch["advantages"][2, 0], before["advantages"][2, 0] * math.exp(-0.1))
    for name, tensor in before.items():
        assert torch.equal(batch.batch[name], tensor), name


def test_off_means_untouched() -> None:
    batch = batch_of(torch.ones(4, 5), mask_of())
    names = set(batch.batch.keys())
    metrics = add_rollout_correction(batch, RolloutCorrectionConfig())
    assert set(metrics) == {
        "rollout_corr/kl", "rollout_corr/k3_kl", *(f"training/rollout_probs_diff_{x}" for x in ("max", "mean", "std")),
    }  # fmt: skip
    assert set(batch.batch.keys()) == names and correct_rows(batch) is batch


def test_extreme_and_empty_rows_stay_finite() -> None:
    mask = mask_of((0, 0, 0, 0))
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="sequence")
    for shift, rows in ((torch.zeros_like(mask), mask), (100.0 * torch.ones_like(mask), mask_of())):
        batch = batch_of(shift, rows)
        metrics = add_rollout_correction(batch, config)
        assert all(math.isfinite(value) for value in metrics.values())
        corrected = correct_rows(batch).batch
        assert torch.isfinite(corrected["advantages"]).all()
        loss = agg_loss(corrected["advantages"], corrected["response_mask"], "token-mean")
        assert torch.isfinite(loss)


def test_an_engine_without_log_probs() -> None:
    batch = batch_of(torch.zeros(4, 5), mask_of())
    batch.batch.pop("rollout_log_probs")
    assert add_rollout_correction(batch, RolloutCorrectionConfig()) == {}
    for config in (RolloutCorrectionConfig(rollout_is="token"), RolloutCorrectionConfig(rollout_rs="token")):
        with pytest.raises(UserError, match=r"temperature=1 .*rollout_is and rollout_rs to null"):
            add_rollout_correction(batch, config)


def test_an_engine_without_log_probs_is_refused_at_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    monkeypatch.setattr(HFRollout, "gives_log_probs", lambda engine, sampling: asked.append(sampling))
    warm = "actor_rollout_ref.rollout.temperature=0.7"
    toy_trainer(toy_config(model, tmp_path, warm)).init_workers()
    assert not asked
    for name in ("rollout_is=token", "rollout_rs=sequence"):
        trainer = toy_trainer(toy_config(model, tmp_path, warm, f"algorithm.rollout_correction.{name}"))
        with pytest.raises(UserError, match=r"temperature=1 .*rollout_is and rollout_rs to null"):
            trainer.init_workers()
        assert asked[-1].temperature == 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("correction") / "hf")


def test_settings_that_cannot_work(model: Path, tmp_path: Path) -> None:
    config = toy_config(model, tmp_path)
    for correction, expected in (
        (RolloutCorrectionConfig(rollout_rs_threshold=2.0), "rollout_rs=sequence"),
        (RolloutCorrectionConfig(rollout_rs="token", rollout_rs_threshold=0.9), "must include 1"),
        (RolloutCorrectionConfig(rollout_rs="token", rollout_rs_threshold_lower=1.5), "must include 1"),
    ):
        algorithm = replace(config.algorithm, rollout_correction=correction)
        with pytest.raises(UserError, match=expected):
            validate_ppo_config(replace(config, algorithm=algorithm))
    for cut in ("top_p=0.9", "top_k=5"):
        config = toy_config(
            model, tmp_path, f"actor_rollout_ref.rollout.{cut}", "algorithm.rollout_correction.rollout_rs=token"
        )
        with pytest.raises(UserError, match=r"top_p=1 and top_k=-1, or rollout_is and rollout_rs to null"):
            validate_ppo_config(config)


def test_where_engine_and_policy_agree_a_correction_changes_nothing(model: Path, tmp_path: Path) -> None:
    lines = []
    for name, overrides in (
        ("plain", ()),
        ("corrected", ("algorithm.rollout_correction.rollout_is=sequence",
                       "algorithm.rollout_correction.rollout_rs=geometric")),
    ):  # fmt: skip
        config = toy_config(model, tmp_path / name, "trainer.total_epochs=1", *overrides)
        lines.append(run_toy(config)[1][0])
    plain, corrected = lines
    assert corrected["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)
    assert corrected["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert abs(plain["rollout_corr/kl"]) < 1e-4 and 0 <= plain["rollout_corr/k3_kl"] < 1e-6
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max"):
        assert corrected[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5)


def test_rejected_rows_teach_nothing(model: Path, tmp_path: Path) -> None:
    config = toy_config(model, tmp_path, "algorithm.rollout_correction.rollout_rs=sequence",
                        "trainer.balance_batch=False")  # fmt: skip
    trainer = toy_trainer(config)
    trainer.init_workers()
    state = StepState(1)
    trainer.collect_rollout(state)
    # The engine claims to have sampled every other row from quite another distribution.
    state.batch.batch["rollout_log_probs"][::2] -= 3.0
    for phase in (trainer.prepare_batch, trainer.compute_old_log_prob, trainer.compute_reward):
        phase(state)
    trainer.compute_advantages(state)
    trainer.prepare_update(state)
    kept = state.rows_to_learn.batch["response_mask"].sum(dim=1)[: len(state.batch)]
    assert (kept[::2] == 0).all() and (kept[1::2] > 0).all()
    assert state.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(0.5, abs=0.02)
    # What is logged about the step is about all of its rows.
    assert (state.batch.batch["response_mask"].sum(dim=1) > 0).all()
    trainer.update_actor(state)
    assert state.metrics["actor/grad_norm"] >= 0
