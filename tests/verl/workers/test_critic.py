# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.verl.workers.support import (
    RESPONSE_LENGTH,
    critic_config,
    largest_difference,
    make_critic,
    training_batch,
    weights_of,
)
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.config.model_sections import CheckpointConfig, CriticOptimConfig
from verl.utils.errors import UserError
from verl.workers.fsdp_workers import CriticWorker

R = RESPONSE_LENGTH
STRATEGIES = ("fsdp", "fsdp2")
SCORED = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def plain_values(folder: Path, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """Values of the library's own model at the tokens before each response token."""
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    positions = torch.clip(columns["attention_mask"].cumsum(1) - 1, min=0)
    with torch.no_grad():
        out = model(input_ids=columns["input_ids"], attention_mask=columns["attention_mask"], position_ids=positions)
    return out.logits[:, -R - 1 : -1, 0] * columns["response_mask"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_stand_before_their_tokens(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    batch = training_batch(10, tiny_model_dir)
    contents = ("model", "optimizer", "extra", "hf_model")
    for packed in (False, True):
        config = critic_config(
            tiny_model_dir,
            strategy=strategy,
            checkpoint=CheckpointConfig(contents=contents),
            model={"use_remove_padding": packed},
        )
        group = make_critic(config)
        values = group.compute_values(batch.select(batch_keys=[*SCORED[:2], *SCORED[3:]])).batch["values"]
        group.save_checkpoint(tmp_path / f"{packed}", 1)
        expected = plain_values(tmp_path / f"{packed}" / "huggingface", batch.batch)
        assert values.dtype == torch.float32
        assert float(expected.abs().max()) > 0.1
        assert torch.allclose(values, expected, atol=1e-5)
    # A critic starts from such a folder with its head.
    again = LocalWorkerGroup(
        ClassWithInitArgs(CriticWorker, config=critic_config(tmp_path / "True" / "huggingface"), device="cpu")
    )
    again.init_model()
    assert torch.allclose(again.compute_values(batch).batch["values"], expected, atol=1e-5)


def test_a_new_head_gives_zero_and_draws_nothing(tiny_model_dir: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    group = LocalWorkerGroup(ClassWithInitArgs(CriticWorker, config=critic_config(tiny_model_dir), device="cpu"))
    group.init_model()
    assert torch.equal(torch.get_rng_state(), before)
    batch = training_batch(4, tiny_model_dir)
    assert float(group.compute_values(batch).batch["values"].abs().max()) == 0.0
    assert "classifier_dropout" in group.worker.model.config.to_dict()
    assert not any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in group.worker.model.modules())


def test_it_learns_returns_and_reports(tiny_model_dir: Path) -> None:
    config = critic_config(tiny_model_dir, optim=CriticOptimConfig(lr=3e-3), cliprange_value=100.0, ppo_epochs=2)
    group = make_critic(config)
    batch = training_batch(8, tiny_model_dir)
    batch.batch["returns"] = 2.0 * batch.batch["response_mask"]
    losses = []
    for _ in range(12):
        values = group.compute_values(batch)
        batch.union(values) if "values" not in batch.batch else batch.batch.update(values.batch)
        metrics = group.update_critic(batch).meta_info["metrics"]
        losses.append(metrics["critic/vf_loss"])
    assert losses[-1] < 0.1 * losses[0]
    assert metrics["critic/vpred_mean"] == pytest.approx(2.0, abs=0.5)
    assert metrics["critic/lr"] == pytest.approx(3e-3)
    assert {"critic/vf_clipfrac", "critic/grad_norm", "critic/skipped_steps", "perf/mfu/critic"} <= set(metrics)
    assert metrics["perf/mfu/critic"] > 0.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_restored_critic_goes_on_bit_for_bit(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    optim = CriticOptimConfig(lr=1e-3, warmup_style="cosine", total_training_steps=10, min_lr_ratio=0.1)
    config = critic_config(tiny_model_dir, strategy=strategy, optim=optim)
    batches = [training_batch(8, tiny_model_dir, seed=seed) for seed in range(3)]
    first, second = make_critic(config), make_critic(config)
    first.update_critic(batches[0])
    first.save_checkpoint(tmp_path / "critic", 1)
    second.update_critic(batches[2])
    second.load_checkpoint(tmp_path / "critic")
    for group in (first, second):
        group.update_critic(batches[1])
    assert largest_difference(weights_of(first.worker), weights_of(second.worker)) == 0.0
    assert first.worker.lr_scheduler.state_dict() == second.worker.lr_scheduler.state_dict()


def test_missing_folders_are_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = critic_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"critic\.model\.path=.*nowhere"):
        make_critic(config)
    config = critic_config(tiny_model_dir, model={"tokenizer_path": str(tmp_path / "no_tokenizer")})
    with pytest.raises(UserError, match=r"critic\.model\.tokenizer_path=.*no_tokenizer"):
        make_critic(config)


def test_overrides_reach_the_model(tiny_model_dir: Path) -> None:
    group = make_critic(critic_config(tiny_model_dir, model={"override_config": {"rms_norm_eps": 0.5}}))
    assert group.worker.model.config.rms_norm_eps == 0.5
    other = make_critic(critic_config(tiny_model_dir))
    batch = training_batch(4, tiny_model_dir)
    values = [worker.compute_values(batch).batch["values"] for worker in (group, other)]
    assert float((values[0] - values[1]).abs().max()) > 1e-2
