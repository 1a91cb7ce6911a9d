# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.trainer.config.model_sections import OptimConfig
from verl.utils import torch_functional as F
from verl.utils.device import resolve_device
from verl.utils.errors import UserError
from verl.utils.fsdp_utils import wrap_units
from verl.utils.import_utils import import_external_libs
from verl.utils.model import compute_position_id_with_mask
from verl.utils.seqlen_balancing import (
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    rearrange_micro_batches,
)
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.model_builder import build_lr_scheduler


@pytest.fixture(scope="module")
def golden(shared_dir: Path) -> dict[str, Any]:
    return json.loads((shared_dir / "compat" / "golden" / "losses.json").read_text())


def _rates(schedule: Any, *args: Any, steps: int, **kwargs: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, *args, **kwargs)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_schedules_match_recorded_values(golden: dict[str, Any]) -> None:
    recorded = golden["schedules"]
    constant = recorded["constant warmup=3"]
    assert _rates(F.get_constant_schedule_with_warmup, 3, steps=len(constant)) == pytest.approx(constant)
    cosine = recorded["cosine warmup=2 total=10 min=0.1"]
    ours = _rates(F.get_cosine_schedule_with_warmup, 2, 10, min_lr_ratio=0.1, steps=len(cosine))
    assert ours[:11] == pytest.approx(cosine[:11])
    # The recorded curve rises again after its last step; ours stays at the end.
    assert ours[11:] == pytest.approx([0.1] * len(ours[11:]))
    wsd = recorded["wsd warmup=2 total=20"]
    assert _rates(F.get_wsd_schedule_with_warmup, 2, 20, steps=len(wsd)) == pytest.approx(wsd)


def test_tensor_functions_match_recorded_values(golden: dict[str, Any]) -> None:
    logits, labels = torch.tensor(golden["logits"]["logits"]), torch.tensor(golden["logits"]["labels"])
    assert torch.allclose(F.logprobs_from_logits(logits, labels), torch.tensor(golden["logits"]["logprobs"]), atol=1e-5)
    assert torch.allclose(F.entropy_from_logits(logits), torch.tensor(golden["logits"]["entropy"]), atol=1e-5)
    ids = torch.tensor(golden["response_mask"]["ids"])
    assert F.get_response_mask(ids, 1).tolist() == golden["response_mask"]["eos=1"]
    assert F.get_response_mask(ids, [1, 2]).tolist() == golden["response_mask"]["eos=[1,2]"]
    values, mask = torch.tensor(golden["advantages"]), torch.tensor(golden["mask"])
    assert float(F.masked_mean(values, mask)) == pytest.approx(golden["masked"]["mean"], abs=1e-5)
    assert float(F.masked_var(values, mask)) == pytest.approx(golden["masked"]["var"], abs=1e-4)
    assert torch.allclose(F.masked_whiten(values, mask), torch.tensor(golden["masked"]["whiten"]), atol=1e-4)
    kept = torch.tensor(golden["masked"]["whiten_keep_mean"])
    assert torch.allclose(F.masked_whiten(values, mask, shift_mean=False), kept, atol=1e-4)


def test_balance_matches_recorded_parts(shared_dir: Path) -> None:
    recorded = json.loads((shared_dir / "compat" / "golden" / "balance.json").read_text())
    equal = get_seqlen_balanced_partitions(recorded["lens"], 4, equal_size=True)
    assert equal == recorded["k4_equal"]
    assert get_seqlen_balanced_partitions(recorded["lens"], 3, equal_size=False) == recorded["k3_unequal"]
    assert log_seqlen_unbalance(recorded["lens"], equal, "global_seqlen") == recorded["log"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
def test_parts_cover_every_row_once(lengths: list[int], parts: int, equal_size: bool) -> None:
    if len(lengths) < parts or (equal_size and len(lengths) % parts):
        with pytest.raises(ValueError, match="rows"):
            get_seqlen_balanced_partitions(lengths, parts, equal_size)
        return
    partitions = get_seqlen_balanced_partitions(lengths, parts, equal_size)
    assert sorted(index for part in partitions for index in part) == list(range(len(lengths)))
    assert all(partitions)
    if equal_size:
        assert {len(part) for part in partitions} == {len(lengths) // parts}


@pytest.mark.parametrize(
    ("lengths", "budget", "count"),
    [([60] * 3, 100, 3), ([50] * 8, 100, 4), ([51] * 4, 100, 4), ([70, 30, 60, 40], 100, 2), ([5], 100, 1)],
)
def test_token_budgets_are_filled_and_never_exceeded(lengths: list[int], budget: int, count: int) -> None:
    batches = rearrange_micro_batches(lengths, budget, same_count_on_all_ranks=False)
    assert len(batches) == count
    assert max(sum(lengths[index] for index in batch) for batch in batches) <= budget


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(100, 400))
def test_token_budget_micro_batches(lengths: list[int], budget: int) -> None:
    batches = rearrange_micro_batches(lengths, budget, same_count_on_all_ranks=False)
    fills = [sum(lengths[index] for index in batch) for batch in batches]
    assert max(fills) <= budget
    # Any two micro-batches of a first fit hold more than one budget together.
    assert len(batches) <= max(1, 2 * sum(lengths) // budget + 1)
    assert all(batches)
    order = [index for batch in batches for index in batch]
    assert [order[position] for position in get_reverse_idx(batches)] == list(range(len(lengths)))
    assert get_reverse_idx(order) == get_reverse_idx(batches)


def test_padding_and_truncation() -> None:
    ids, mask = torch.arange(1, 6)[None], torch.ones(1, 5, dtype=torch.int64)
    wide, wide_mask = F.postprocess_data(ids, mask, 7, pad_token_id=0)
    assert wide.tolist() == [[0, 0, 1, 2, 3, 4, 5]] and wide_mask.tolist() == [[0, 0, 1, 1, 1, 1, 1]]
    expected = {"left": [3, 4, 5], "right": [1, 2, 3], "middle": [1, 4, 5]}
    for mode, kept in expected.items():
        assert F.postprocess_data(ids, mask, 3, 0, truncation=mode)[0].tolist() == [kept]
    with pytest.raises(ValueError, match="5 tokens are more than the limit of 3"):
        F.postprocess_data(ids, mask, 3, 0)
    assert F.remove_pad_token(wide, wide_mask) == [[1, 2, 3, 4, 5]]
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, 3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert compute_position_id_with_mask(wide_mask).tolist() == [[0, 0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("tied", [True, False])
def test_units_of_sharding(tied: bool) -> None:
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    assert wrap_units(model) == list(model.model.layers)
    units = wrap_units(model, min_num_params=6000)
    ends = {model.model.embed_tokens, model.lm_head}
    # With tied weights neither end may be a unit of its own.
    assert ends & set(units) == (set() if tied else ends)
    assert {type(unit).__name__ for unit in units} <= {"Embedding", "Linear", "Qwen2MLP", "Qwen2Model"}


def test_impossible_requests_are_named() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(UserError, match="total_training_steps"):
        build_lr_scheduler(optimizer, OptimConfig(warmup_style="cosine"))
    with pytest.raises(UserError, match="unknown dtype"):
        PrecisionType.to_dtype("int3", "rollout.dtype")
    with pytest.raises(UserError, match=r"trainer\.device=tpu"):
        resolve_device("tpu")
    with pytest.raises(ValueError, match="at least two"):
        F.masked_var(torch.ones(3), torch.tensor([1, 0, 0]))


def test_external_modules_are_imported_and_missing_ones_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl_test_external_lib.py").write_text("import module_that_is_not_there_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_external_libs(None)
    import_external_libs(("json", "string"))
    with pytest.raises(UserError, match=r"model\.external_lib names 'no\.such', but no module 'no'"):
        import_external_libs("no.such")
    with pytest.raises(ModuleNotFoundError, match="either"):
        import_external_libs("verl_test_external_lib")
