# SPDX-License-Identifier: Apache-2.0
"""However a batch is cut, packed, ordered, filled up or sharded: the update is the written-out one, to 1e-5."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl.workers import reference_update as written_out
from tests.verl.workers.support import (
    critic_config,
    largest_difference,
    make_critic,
    make_group,
    training_batch,
    use_sgd,
    weights_of,
    worker_config,
)
from verl.protocol import DataProto
from verl.trainer.config.model_sections import FSDPConfig, MixedPrecisionConfig
from verl.workers.batching import MicroBatching

# 10 rows in mini-batches of 4, 4 and 2: the last one counts as much as the others.
ROWS, MINI = 10, 4
TOLERANCE = 1e-5
FLOAT32 = MixedPrecisionConfig("fp32", "fp32", "fp32")


@dataclass(frozen=True)
class Variant:
    """One way to run the same update."""

    rows: int = 4
    budget: int | None = None
    packed: bool = False
    strategy: str = "fsdp2"
    gradient_checkpointing: bool = False
    reordered: bool = False
    extra_rows: int = 0

    @property
    def batching(self) -> MicroBatching:
        return MicroBatching(max_tokens=self.budget) if self.budget else MicroBatching(rows=self.rows)

    def arrange(self, batch: DataProto, path: Path) -> DataProto:
        """The same rows, in another order inside each mini-batch, or with rows that teach nothing behind them."""
        if self.reordered:
            batch = batch[[2, 3, 0, 1, 7, 6, 5, 4, 9, 8]]
        if self.extra_rows:
            extra = training_batch(self.extra_rows, path, seed=9)
            for name in ("response_mask", "advantages", "returns"):
                # Zeros in the mask, and what must not be looked at.
                extra.batch[name] = torch.zeros_like(extra.batch[name]) if "mask" in name else extra.batch[name] * 1e9
            batch = DataProto.concat([batch, extra])
        return batch


VARIANTS = {
    "micro-batches of 1": Variant(rows=1),
    "micro-batches of 2": Variant(rows=2),
    "micro-batches of 4": Variant(rows=4),
    "token budget": Variant(budget=110),
    "packed": Variant(packed=True),
    "packed, micro-batches of 1, fsdp": Variant(rows=1, packed=True, strategy="fsdp"),
    "packed, token budget, checkpointing": Variant(budget=110, packed=True, gradient_checkpointing=True),
    "row order": Variant(rows=2, reordered=True),
    "extra rows": Variant(rows=3, extra_rows=2),
    "extra rows, packed": Variant(budget=130, packed=True, extra_rows=2),
    "fsdp": Variant(strategy="fsdp"),
}


def run_actor(path: Path, variant: Variant, mode: str, device: str = "cpu", **options: Any) -> written_out.Result:
    """Weights and metrics of the actor's worker after one update in float32."""
    actor = {
        "strategy": variant.strategy,
        "fsdp_config": FSDPConfig(mixed_precision=FLOAT32),
        "loss_agg_mode": mode,
        "ppo_mini_batch_size": MINI,
        "entropy_coeff": written_out.ENTROPY_COEFF,
        "use_kl_loss": True,
        "kl_loss_coef": written_out.KL_COEF,
    } | options
    model = {
        "use_remove_padding": variant.packed,
        "enable_gradient_checkpointing": variant.gradient_checkpointing,
    }
    group = make_group(worker_config(path, actor=actor, model=model), "actor", device)
    use_sgd(group.worker)
    group.worker.actor.updates.batching = variant.batching
    batch = variant.arrange(training_batch(ROWS, path), path)
    metrics = group.update_actor(batch).meta_info["metrics"]
    return weights_of(group.worker), metrics


def run_critic(path: Path, variant: Variant, mode: str, device: str = "cpu") -> written_out.Result:
    """The same for the critic's."""
    config = critic_config(
        path,
        strategy=variant.strategy,
        loss_agg_mode=mode,
        ppo_mini_batch_size=MINI,
        cliprange_value=written_out.VALUE_CLIP,
        model={
            "use_remove_padding": variant.packed,
            "enable_gradient_checkpointing": variant.gradient_checkpointing,
            "fsdp_config": FSDPConfig(mixed_precision=FLOAT32),
        },
    )
    group = make_critic(config, device)
    use_sgd(group.worker)
    group.worker.critic.updates.batching = variant.batching
    batch = variant.arrange(training_batch(ROWS, path), path)
    metrics = group.update_critic(batch).meta_info["metrics"]
    return weights_of(group.worker), metrics


def value_head(path: Path) -> dict[str, torch.Tensor]:
    """The head that `make_critic` gives to every value model."""
    weights = weights_of(make_critic(critic_config(path)).worker)
    return {name: weight for name, weight in weights.items() if name.startswith("score.")}


def close(ours: written_out.Result, expected: written_out.Result, role: str, tolerance: float = TOLERANCE) -> None:
    """Equal weights, and equal values of the metrics that both have."""
    weights, metrics = expected
    assert largest_difference({name: ours[0][name] for name in weights}, weights) < tolerance
    for name, value in metrics.items():
        key = f"{role}/grad_norm" if name == "grad_norm" else name
        assert ours[1][key] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), name


@pytest.mark.parametrize("mode", written_out.LOSS_AGG_MODES)
def test_actor_updates_are_the_written_out_one(tiny_model_dir: Path, mode: str) -> None:
    expected = written_out.actor_update(tiny_model_dir, training_batch(ROWS, tiny_model_dir), MINI, mode)
    for name, variant in VARIANTS.items():
        print(name)
        weights, metrics = run_actor(tiny_model_dir, variant, mode)
        close((weights, metrics), expected, "actor")


@pytest.mark.parametrize("mode", written_out.LOSS_AGG_MODES)
def test_critic_updates_are_the_written_out_one(tiny_model_dir: Path, mode: str) -> None:
    head = value_head(tiny_model_dir)
    expected = written_out.critic_update(tiny_model_dir, head, training_batch(ROWS, tiny_model_dir), MINI, mode)
    for name, variant in VARIANTS.items():
        print(name)
        close(run_critic(tiny_model_dir, variant, mode), expected, "critic")


def test_the_check_can_fail(tiny_model_dir: Path) -> None:
    expected = written_out.actor_update(tiny_model_dir, training_batch(ROWS, tiny_model_dir), MINI, "token-mean")
    with pytest.raises(AssertionError):
        close(run_actor(tiny_model_dir, Variant(), "token-mean", entropy_coeff=0.02), expected, "actor")
    with pytest.raises(AssertionError):
        close(
            run_actor(tiny_model_dir, replace(Variant(), rows=5), "token-mean", ppo_mini_batch_size=5),
            expected,
            "actor",
        )
