# SPDX-License-Identifier: Apache-2.0
"""Attention, packing, precision and kernels: what each option does to the model, and what is refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.bench import bench_packing
from tests.verl.workers.support import largest_difference, make_group, training_batch, weights_of, worker_config
from verl.trainer.config.model_sections import FSDPConfig, MixedPrecisionConfig
from verl.utils.errors import UserError
from verl.utils.flops_counter import FlopsCounter, device_peak_flops
from verl.utils.fsdp_utils import finite_step
from verl.utils.selected_logits import selected_logits
from verl.workers import model_builder
from verl.workers.forward import RowForward
from verl.workers.model_builder import resolve_attn_implementation
from verl.workers.packed_attention import PACKED_SDPA, PackedRows, check_can_pack

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random_rows(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and attention mask ``(B, 24)``, response mask ``(B, 8)``: the last 3 tokens are the response."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(len(lengths), 24, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, 19 - length : 19] = 1
    return torch.randint(1, 50, mask.shape, generator=generator), mask, mask[:, 16:].clone()


@pytest.mark.slow
def test_the_packing_benchmark_compares_equal_gradients() -> None:
    table = bench_packing.run(4, 1, [("tiny", {})])
    assert len(table) == 4 and table[0][1] == "padded to the full width"


@pytest.mark.parametrize("window", [None, 4])
def test_packed_rows_do_not_see_each_other(window: int | None) -> None:
    torch.manual_seed(0)
    # A configuration each: a model writes its attention into it.
    plain, packed = (
        MistralForCausalLM._from_config(MistralConfig(**SIZES, sliding_window=window), attn_implementation=name).eval()
        for name in ("sdpa", PACKED_SDPA)
    )
    packed.load_state_dict(plain.state_dict())
    ids, mask, wanted = random_rows([19, 5, 17, 6, 6, 18, 3])
    with torch.no_grad():
        expected = RowForward(plain)(ids, mask, wanted).values
        assert torch.allclose(RowForward(packed, packed=True)(ids, mask, wanted).values, expected, atol=1e-5)
        # One row alone gives the same numbers: nothing leaks from its neighbours.
        alone = RowForward(packed, packed=True)(ids[2:3], mask[2:3], wanted[2:3])
    assert torch.allclose(alone.values, expected[6:9], atol=1e-5)


def test_blocks_hold_similar_rows_in_order() -> None:
    rows = PackedRows([20, 18, 15, 14, 3, 3, 1], CPU)
    assert [(block.start, block.stop, block.rows, block.longest) for block in rows.blocks] == [
        (0, 38, 2, 20), (38, 67, 2, 15), (67, 73, 2, 3), (73, 74, 1, 1),
    ]  # fmt: skip
    assert [block.slots is None for block in rows.blocks] == [False, False, True, True]
    states = torch.arange(74.0).view(1, 1, 74, 1)
    packed = torch.cat([block.pack(block.unpack(states).transpose(1, 2)) for block in rows.blocks])
    assert torch.equal(packed.flatten(), states.flatten())


def test_attention_that_cannot_pack_is_refused() -> None:
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**SIZES), attn_implementation=PACKED_SDPA)
    with pytest.raises(UserError, match="use_remove_padding=False"):
        selected_logits(model, torch.ones(1, 4, dtype=torch.int64), torch.zeros(1).long(), torch.zeros(1).long())
    check_can_pack(Qwen2Config(**SIZES))
    config = Qwen2Config(**SIZES)
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        check_can_pack(config)


def test_choice_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_attn_implementation(CPU) == resolve_attn_implementation(CUDA) == "sdpa"
    assert resolve_attn_implementation(CPU, packed=True) == PACKED_SDPA
    with pytest.raises(UserError, match="flash-attn"):
        resolve_attn_implementation(CUDA, "flash_attention_2")
    with pytest.raises(UserError, match="use_remove_padding=False"):
        resolve_attn_implementation(CPU, "eager", packed=True)
    monkeypatch.setattr(model_builder, "is_installed", lambda name: True)
    assert resolve_attn_implementation(CUDA) == resolve_attn_implementation(CUDA, packed=True) == "flash_attention_2"
    assert resolve_attn_implementation(CUDA, half_precision=False) == "sdpa"
    assert resolve_attn_implementation(CUDA, "sdpa", packed=True) == PACKED_SDPA
    assert resolve_attn_implementation(CPU) == "sdpa"


def test_attention_of_the_config_reaches_the_policy(tiny_model_dir: Path) -> None:
    batch = training_batch(4, tiny_model_dir)
    scores = []
    for name in ("sdpa", "eager"):
        model = {"override_config": {"attn_implementation": name}}
        group = make_group(worker_config(tiny_model_dir, model=model))
        assert group.worker.actor_model.config._attn_implementation == name
        assert "attn_implementation" not in group.worker.actor_model.config.to_dict()
        scores.append(group.compute_log_prob(batch).batch["old_log_probs"])
    assert torch.allclose(*scores, atol=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("packed", [False, True])
def test_mixed_precision_computes_low_and_stores_high(tiny_model_dir: Path, strategy: str, packed: bool) -> None:
    batch = training_batch(8, tiny_model_dir)
    exact = make_group(worker_config(tiny_model_dir), "actor")
    mixed = MixedPrecisionConfig(param_dtype="bf16", reduce_dtype="fp32", buffer_dtype="fp32")
    actor = {"strategy": strategy, "fsdp_config": FSDPConfig(mixed_precision=mixed)}
    group = make_group(worker_config(tiny_model_dir, actor=actor, model={"use_remove_padding": packed}), "actor")
    seen = []
    group.worker.actor_model.get_output_embeddings().register_forward_hook(lambda *args: seen.append(args[2].dtype))
    low, high = (worker.compute_log_prob(batch).batch["old_log_probs"] for worker in (group, exact))
    assert set(seen) == {torch.bfloat16} and low.dtype == torch.float32
    assert 0.0 < float((low - high).abs().max()) < 0.2
    before = weights_of(group.worker)
    assert group.update_actor(batch).meta_info["metrics"]["actor/skipped_steps"] == 0
    assert {weight.dtype for weight in weights_of(group.worker).values()} == {torch.float32}
    assert largest_difference(weights_of(group.worker), before) > 1e-4


def test_liger_is_applied_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="liger-kernel"):
        model_builder.apply_liger(torch.nn.Linear(1, 1), CUDA)
    calls = []
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches._apply_liger_kernel_to_instance = lambda **options: calls.append(options)  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    monkeypatch.setattr(model_builder, "is_installed", lambda name: True)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match="CUDA"):
        model_builder.apply_liger(model, CPU)
    model_builder.apply_liger(model, CUDA)
    assert calls == [{"model": model, "fused_linear_cross_entropy": False, "cross_entropy": False}]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    assert finite_step(model, [optimizer], 1.0) == pytest.approx(3.0**0.5)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    moments = optimizer.state[model.weight]["exp_avg"].clone()
    (model(torch.ones(1, 2)) * torch.inf).sum().backward()
    assert not torch.isfinite(torch.tensor(finite_step(model, [optimizer], 1.0)))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moments)
    assert model.weight.grad is None


def test_operations_are_counted_from_the_sizes(tiny_model_dir: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(tiny_model_dir).config
    # 2 layers of hidden 64, 4 heads and 2 key/value heads of 16, MLP 128; the tied head.
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * config.vocab_size
    expected = 6 * weights * 30 + 12 * 2 * 64 * (10**2 + 20**2)
    assert FlopsCounter(config).estimate_flops([10, 20], 2.0)[0] == pytest.approx(expected / 2 / 1e12)
    smaller = FlopsCounter(config, vocabulary_head=False, frozen=True).estimate_flops([10, 20], 2.0)[0]
    less = 4 * (weights - 64 * config.vocab_size) * 30 + 12 * 2 * 64 * 500
    assert smaller == pytest.approx(less / 2 / 1e12)
    assert FlopsCounter(types.SimpleNamespace(to_dict=dict)).estimate_flops([10], 1.0)[0] == 0.0  # type: ignore[arg-type]
    peak = device_peak_flops(CPU)
    assert peak is not None and peak > 1e8
