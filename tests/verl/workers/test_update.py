# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl.workers.support import (
    largest_difference,
    make_group,
    training_batch,
    use_sgd,
    weights_of,
    worker_config,
)
from verl.protocol import DataProto
from verl.trainer.config.model_sections import OptimConfig
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.workers.actor.dp_actor import score_responses
from verl.workers.batching import MicroBatching

FULL_LOSS = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}


def update(
    path: Path,
    batch: DataProto,
    *,
    batching: MicroBatching | None = None,
    model: dict[str, Any] | None = None,
    **actor: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after one `update_actor` with plain gradient descent from the initial model."""
    group = make_group(worker_config(path, actor=actor, model=model or {}), "actor")
    use_sgd(group.worker)
    if batching is not None:
        group.worker.actor.updates.batching = batching
    metrics = group.update_actor(batch).meta_info["metrics"]
    return weights_of(group.worker), metrics


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_do_not_change_the_update(tiny_model_dir: Path, mode: str) -> None:
    # 10 rows: mini-batches of 4, 4 and 2.
    batch = training_batch(10, tiny_model_dir)
    options = dict(FULL_LOSS, loss_agg_mode=mode, ppo_mini_batch_size=4)
    expected, metrics = update(tiny_model_dir, batch, batching=MicroBatching(rows=4), **options)
    for batching in (MicroBatching(rows=1), MicroBatching(rows=2), MicroBatching(max_tokens=120)):
        weights, other = update(tiny_model_dir, batch, batching=batching, **options)
        assert largest_difference(weights, expected) < 1e-5
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm"):
            assert other[name] == pytest.approx(metrics[name], abs=1e-5), name


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_packing_and_strategy_do_not_change_the_update(tiny_model_dir: Path, strategy: str) -> None:
    batch = training_batch(8, tiny_model_dir)
    expected, _ = update(tiny_model_dir, batch, **FULL_LOSS)
    weights, _ = update(tiny_model_dir, batch, strategy=strategy, model={"use_remove_padding": True}, **FULL_LOSS)
    assert largest_difference(weights, expected) < 1e-5
    checkpointed, _ = update(
        tiny_model_dir, batch, strategy=strategy, model={"enable_gradient_checkpointing": True}, **FULL_LOSS
    )
    assert largest_difference(checkpointed, expected) < 1e-5


def test_update_is_the_written_out_loss(tiny_model_dir: Path) -> None:
    batch = training_batch(6, tiny_model_dir)
    group = make_group(worker_config(tiny_model_dir, actor=dict(FULL_LOSS, grad_clip=1e9)), "actor")
    worker = group.worker
    use_sgd(worker)
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    scores = score_responses(
        worker.actor.forward, columns["input_ids"], columns["attention_mask"], mask, temperature=1.0, with_entropy=True
    )
    ratio = torch.exp(scores.log_probs - columns["old_log_probs"])
    advantages = columns["advantages"]
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * 3.0), loss)
    kl = kl_penalty(scores.log_probs, columns["ref_log_prob"], "low_var_kl")
    total = (loss - 0.01 * scores.entropy + 0.1 * kl)[mask].mean()
    total.backward()
    expected = {name: (p.detach() - p.grad).to_local() for name, p in worker.actor_model.named_parameters()}
    worker.optimizer.zero_grad()
    metrics = group.update_actor(batch).meta_info["metrics"]
    after = {name: p.detach().to_local() for name, p in worker.actor_model.named_parameters()}
    assert largest_difference(after, expected) < 1e-5
    assert metrics["actor/pg_loss"] == pytest.approx(float(agg_loss(loss, mask, "token-mean")), abs=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(float(kl[mask].mean()), abs=1e-6)
    assert metrics["actor/kl_coef"] == 0.1


def test_rows_without_response_tokens_change_nothing(tiny_model_dir: Path) -> None:
    batch = training_batch(6, tiny_model_dir)
    expected, metrics = update(tiny_model_dir, batch, **FULL_LOSS, ppo_mini_batch_size=12)
    extra = training_batch(6, tiny_model_dir, seed=9)
    extra.batch["response_mask"] = torch.zeros_like(extra.batch["response_mask"])
    extra.batch["advantages"] = torch.full_like(extra.batch["advantages"], torch.nan)
    padded = DataProto.concat([batch, extra])
    for batching in (MicroBatching(rows=3), MicroBatching(rows=12)):
        weights, other = update(tiny_model_dir, padded, batching=batching, **FULL_LOSS, ppo_mini_batch_size=12)
        assert largest_difference(weights, expected) < 1e-5
        assert other["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], abs=1e-5)


def test_a_mini_batch_of_empty_rows_takes_no_step(tiny_model_dir: Path) -> None:
    group = make_group(worker_config(tiny_model_dir), "actor")
    batch = training_batch(8, tiny_model_dir)
    group.update_actor(batch)  # AdamW now has momentum, which alone would move the weights
    before = weights_of(group.worker)
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    metrics = group.update_actor(batch).meta_info["metrics"]
    assert largest_difference(weights_of(group.worker), before) == 0.0
    assert metrics["actor/skipped_steps"] == 0


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_step_that_is_not_finite_is_left_out_and_counted(tiny_model_dir: Path, strategy: str) -> None:
    group = make_group(worker_config(tiny_model_dir, actor={"strategy": strategy, "ppo_mini_batch_size": 4}), "actor")
    batch = training_batch(4, tiny_model_dir)
    group.update_actor(batch)
    before = weights_of(group.worker)
    state = {k: v.clone() for k, v in group.worker.optimizer.state_dict()["state"][0].items()}
    poisoned = training_batch(4, tiny_model_dir)
    poisoned.batch["advantages"][2, 0] = torch.inf
    metrics = group.update_actor(poisoned).meta_info["metrics"]
    assert metrics["actor/skipped_steps"] == 1
    assert largest_difference(weights_of(group.worker), before) == 0.0
    after = group.worker.optimizer.state_dict()["state"][0]
    assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(after[key])) for key in state)
    # The other mini-batch of the same call still counts.
    metrics = group.update_actor(DataProto.concat([poisoned, batch])).meta_info["metrics"]
    assert metrics["actor/skipped_steps"] == 1
    assert all(value == value and abs(value) != float("inf") for value in metrics.values())
    assert largest_difference(weights_of(group.worker), before) > 0.0


def test_log_ratios_far_out_leave_finite_weights(tiny_model_dir: Path) -> None:
    batch = training_batch(4, tiny_model_dir)
    batch.batch["old_log_probs"] = batch.batch["old_log_probs"] + torch.tensor([[200.0], [-200.0], [0.0], [200.0]])
    batch.batch["ref_log_prob"] = batch.batch["ref_log_prob"] - 200.0
    weights, _ = update(tiny_model_dir, batch, **FULL_LOSS)
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_learning_rate_logged_is_the_one_used(tiny_model_dir: Path) -> None:
    config = worker_config(tiny_model_dir)
    optim = OptimConfig(lr=1e-3, warmup_style="cosine", lr_warmup_steps=1, total_training_steps=3, min_lr_ratio=0.1)
    group = make_group(replace(config, actor=replace(config.actor, optim=optim)), "actor")
    batch = training_batch(8, tiny_model_dir)
    before = weights_of(group.worker)
    rates = [group.update_actor(batch).meta_info["metrics"]["actor/lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-4, 1e-3, 5.5e-4, 1e-4])
    assert largest_difference(weights_of(group.worker), before) > 1e-4


def test_epochs_and_mini_batches_step_in_order(tiny_model_dir: Path) -> None:
    batch = training_batch(8, tiny_model_dir)
    group = make_group(worker_config(tiny_model_dir, actor={"ppo_mini_batch_size": 4, "ppo_epochs": 2}), "actor")
    steps = []
    original = group.worker.optimizer.step
    group.worker.optimizer.step = lambda *args, **kwargs: (steps.append(1), original(*args, **kwargs))[1]
    group.update_actor(batch)
    assert len(steps) == 4


def test_a_mini_batch_smaller_than_the_ranks_is_refused(tiny_model_dir: Path) -> None:
    group = make_group(worker_config(tiny_model_dir, actor={"ppo_mini_batch_size": 1}), "actor")
    group.worker.actor.updates.world_size = 2
    with pytest.raises(ValueError, match="ppo_mini_batch_size=1"):
        group.update_actor(training_batch(4, tiny_model_dir))
