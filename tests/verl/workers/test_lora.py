# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.helpers.tiny import make_tiny_model
from tests.verl.workers import reference_update as written_out
from tests.verl.workers.support import (
    RESPONSE_LENGTH,
    critic_config,
    largest_difference,
    make_critic,
    make_group,
    prompt_batch,
    training_batch,
    use_sgd,
    weights_of,
    worker_config,
)
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.errors import UserError
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.lora import LoRASettings, merge_adapters
from verl.workers.rollout.session import rollout_session

STRATEGIES = ("fsdp", "fsdp2")
LORA = {"lora_rank": 4, "lora_alpha": 8}


def lora_group(path: Path, strategy: str = "fsdp2", role: str = "actor_rollout", **model: Any) -> LocalWorkerGroup:
    return make_group(worker_config(path, actor={"strategy": strategy}, model=LORA | model), role)


def log_probs(group: LocalWorkerGroup, batch: DataProto) -> Tensor:
    return group.compute_log_prob(batch).batch["old_log_probs"]


def library_log_probs(model: torch.nn.Module, batch: DataProto) -> Tensor:
    columns = dict(batch.batch.items())
    with torch.no_grad():
        distribution = torch.log_softmax(written_out.outputs_before_responses(model.eval(), columns), dim=-1)
    return distribution.gather(2, columns["responses"][..., None])[..., 0] * columns["response_mask"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_adapters_train_and_switched_off_they_leave_the_reference(tiny_model_dir: Path, strategy: str) -> None:
    batch = training_batch(8, tiny_model_dir)
    group = lora_group(tiny_model_dir, strategy)
    reference = log_probs(make_group(worker_config(tiny_model_dir), "actor"), batch)
    assert torch.equal(log_probs(group, batch), reference)
    before = weights_of(group.worker)
    for _ in range(2):
        group.update_actor(batch)
    after = weights_of(group.worker)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert {name.split(".")[-4] for name in moved} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert float((log_probs(group, batch) - reference).abs().max()) > 1e-2
    assert torch.equal(group.compute_ref_log_prob(batch).batch["ref_log_prob"], reference)
    assert float((log_probs(group, batch) - reference).abs().max()) > 1e-2


@pytest.mark.parametrize("variant", [{}, {"use_remove_padding": True, "enable_gradient_checkpointing": True}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_are_those_of_the_library(tiny_model_dir: Path, strategy: str, variant: dict[str, Any]) -> None:
    batch = training_batch(8, tiny_model_dir)
    actor = {
        "strategy": strategy,
        "ppo_mini_batch_size": 4,
        "entropy_coeff": written_out.ENTROPY_COEFF,
        "use_kl_loss": True,
        "kl_loss_coef": written_out.KL_COEF,
    }
    group = make_group(worker_config(tiny_model_dir, actor=actor, model=LORA | variant), "actor")
    use_sgd(group.worker)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), config)
    start = {f"base_model.model.{name}": weight for name, weight in weights_of(group.worker).items()}
    plain.load_state_dict({name: weight for name, weight in start.items() if ".lora_" in name}, strict=False)
    weights, metrics = written_out.descend(
        plain, batch, 4, 1.0, lambda *args: written_out.actor_loss(*args, "token-mean")
    )
    ours = group.update_actor(batch).meta_info["metrics"]
    updated = {f"base_model.model.{name}": weight for name, weight in weights_of(group.worker).items()}
    trained = [name for name in weights if ".lora_" in name]
    assert len(trained) == 28
    assert max(float((updated[name] - weights[name]).abs().max()) for name in trained) < 1e-5
    assert ours["actor/grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_engine_and_exports_hold_merged_weights(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    batch, prompts = training_batch(8, tiny_model_dir), prompt_batch(tiny_model_dir)
    group = lora_group(tiny_model_dir, strategy)
    for _ in range(3):
        group.update_actor(batch)
    trained = log_probs(group, batch)
    with rollout_session(group, 1):
        rows = group.generate_sequences(prompts)
    rows.meta_info["temperature"] = 1.0
    mask = rows.batch["attention_mask"][:, -RESPONSE_LENGTH:].bool()
    assert float((log_probs(group, rows) - rows.batch["rollout_log_probs"])[mask].abs().max()) < 1e-4

    group.save_checkpoint(tmp_path / "actor", 3)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "huggingface")
    assert not any("lora" in name for name in merged.state_dict())
    assert torch.allclose(library_log_probs(merged, batch), trained, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    adapted = PeftModel.from_pretrained(base, tmp_path / "actor" / "lora_adapter")
    assert torch.allclose(library_log_probs(adapted, batch), trained, atol=1e-5)
    assert adapted.peft_config["default"].base_model_name_or_path == str(tiny_model_dir)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_restored_run_goes_on_bit_for_bit(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    batches = [training_batch(8, tiny_model_dir, seed=seed) for seed in range(3)]
    first, second = (lora_group(tiny_model_dir, strategy, "actor") for _ in range(2))
    first.update_actor(batches[0])
    first.save_checkpoint(tmp_path / "actor", 1)
    saved = torch.load(tmp_path / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    assert saved and all(".lora_" in name for name in saved)
    second.update_actor(batches[2])
    second.load_checkpoint(tmp_path / "actor")
    for group in (first, second):
        group.update_actor(batches[1])
    assert largest_difference(weights_of(first.worker), weights_of(second.worker)) == 0.0
    other = make_group(worker_config(tiny_model_dir, model=LORA | {"target_modules": ("q_proj",)}), "actor")
    with pytest.raises(UserError, match=r"of another model .*lora_A.*model\.lora_rank"):
        other.load_checkpoint(tmp_path / "actor")


@pytest.mark.parametrize(
    ("strategy", "adapters", "warns"), [("fsdp", True, True), ("fsdp", False, False), ("fsdp2", True, False)]
)
def test_another_strategy_than_the_asked_one_is_said(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture, strategy: str, adapters: bool, warns: bool
) -> None:
    config = worker_config(tiny_model_dir, actor={"strategy": strategy}, model=LORA if adapters else {})
    group = make_group(config, "actor")
    assert fsdp_version(group.worker.actor_model) == (1 if (strategy, adapters) == ("fsdp", False) else 2)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("strategy=fsdp:" in text and "fsdp2" in text for text in said) == warns


def test_a_critic_with_adapters_trains_its_head_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = critic_config(tiny_model_dir, model=LORA)
    group = make_critic(config)
    batch = training_batch(8, tiny_model_dir)
    before = weights_of(group.worker)
    for _ in range(2):
        group.update_critic(batch)
    after = weights_of(group.worker)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name or name.startswith("score.")}
    group.save_checkpoint(tmp_path / "critic", 1)
    values = group.compute_values(batch).batch["values"]
    again = make_critic(config)
    again.load_checkpoint(tmp_path / "critic")
    assert torch.equal(again.compute_values(batch).batch["values"], values)
    base = AutoModelForTokenClassification.from_pretrained(tiny_model_dir, num_labels=1)
    adapted = PeftModel.from_pretrained(base, tmp_path / "critic" / "lora_adapter").eval()
    with torch.no_grad():
        plain = written_out.outputs_before_responses(adapted, dict(batch.batch.items()))[..., 0]
    assert torch.allclose(plain * batch.batch["response_mask"], values, atol=1e-5)


def test_target_modules(tiny_model_dir: Path) -> None:
    for targets, layers in (("q_proj", {"q_proj"}), (("q_proj", "up_proj"), {"q_proj", "up_proj"}), (".*_proj", None)):
        group = lora_group(tiny_model_dir, role="actor", target_modules=targets)
        names = {name.split(".")[-4] for name in weights_of(group.worker) if ".lora_" in name}
        assert names == layers or (layers is None and len(names) == 7)
    for targets, reason in (("qq_proj", "qq_proj"), (("embed_tokens",), "no linear layer")):
        with pytest.raises(UserError, match=rf"actor_rollout_ref\.model\.target_modules=.*{reason}"):
            lora_group(tiny_model_dir, role="actor", target_modules=targets)


def test_a_tied_head_is_not_adapted(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lm_head shares its weight with another layer"):
        lora_group(tiny_model_dir, role="actor", target_modules=("q_proj", "lm_head"))
    untied = make_tiny_model(tmp_path / "untied", tie_word_embeddings=False)
    names = weights_of(lora_group(untied, role="actor", target_modules=("lm_head",)).worker)
    assert any(name.startswith("lm_head.lora_A") for name in names)


def test_merging_is_the_formula_and_needs_all_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    base, down, up = (torch.randn(*shape, generator=generator) for shape in ((5, 3), (2, 3), (5, 2)))
    weights = {
        "x.base_layer.weight": base,
        "x.base_layer.bias": torch.ones(5),
        "x.lora_A.default.weight": down,
        "x.lora_B.default.weight": up,
        "norm.weight": torch.ones(3),
    }
    merged = dict(merge_adapters(weights.items(), LoRASettings(rank=2, alpha=6)))
    assert set(merged) == {"x.weight", "x.bias", "norm.weight"}
    assert torch.allclose(merged["x.weight"], base + 3.0 * up @ down)
    del weights["x.lora_B.default.weight"]
    with pytest.raises(RuntimeError, match="x"):
        list(merge_adapters(weights.items(), LoRASettings(rank=2, alpha=6)))
