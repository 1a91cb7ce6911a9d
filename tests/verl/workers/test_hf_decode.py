# SPDX-License-Identifier: Apache-2.0
"""Rows that join a running batch and leave it sample what they sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from tests.helpers.streams import assert_equal_rows, named, stream
from tests.verl.workers.support import prompt_batch
from verl.protocol import DataProto
from verl.trainer.config.worker_sections import RolloutConfig
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.sampling import SamplingParams

ENDS = tuple(range(2, 30))
LENGTH = 14


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


def engine(model: Any, **config: Any) -> HFRollout:
    return HFRollout(model, RolloutConfig(response_length=LENGTH, **config), eos_token_ids=ENDS, pad_token_id=0)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.7])
@pytest.mark.parametrize("sizes", [[24], [1, 5, 0, 9, 2, 7], [12, 12]])
def test_joining_rows_sample_what_they_sample_together(
    model: Any, tiny_model_dir: Path, sizes: list[int], share: float
) -> None:
    prompts = prompt_batch(tiny_model_dir, repeat=3)
    rollout = engine(model)
    whole = rollout.generate_sequences(prompts)
    assert int(whole.batch["close_draws"].sum()) == 0, "choose other seeds: these leave a token to rounding"
    lengths = (whole.batch["rollout_log_probs"] != -1).sum(dim=1)
    assert lengths.min() < lengths.max() == LENGTH
    ended, counts = stream(rollout, named(prompts, share), sizes)
    assert_equal_rows(ended, whole)
    # No call waits for all of them, and none returns nothing while something is under way.
    assert max(counts) < 24 and 0 not in counts[: counts.index(0)] and sum(counts) == 24


def test_no_more_rows_than_the_limit_at_a_time(
    model: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompt_batch(tiny_model_dir, repeat=3)
    whole = engine(model).generate_sequences(prompts)
    rollout = engine(model, max_num_seqs=5)
    rows: list[int] = []
    forward = rollout._forward

    def counted(ids: Any, *args: Any) -> Any:
        rows.append(ids.shape[0])
        return forward(ids, *args)

    monkeypatch.setattr(rollout, "_forward", counted)
    assert_equal_rows(stream(rollout, named(prompts, 0.25), [24])[0], whole)
    assert max(rows) <= 5


def test_a_shared_prompt_is_computed_once(model: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn of a group: one prompt, eight seeds."""
    one = prompt_batch(tiny_model_dir)[1:2]
    group = DataProto.concat([one] * 8)
    group.batch["sampling_seed"] = torch.arange(8) * 31
    rollout = engine(model)
    prefilled: list[int] = []
    forward = rollout._forward

    def counted(ids: Any, *args: Any) -> Any:
        if ids.shape[1] > 1:
            prefilled.append(ids.numel())
        return forward(ids, *args)

    monkeypatch.setattr(rollout, "_forward", counted)
    ended, _ = stream(rollout, named(group, 0.25), [8])
    assert prefilled == [int(one.batch["attention_mask"].sum())]
    assert len({tuple(single.batch["responses"][0].tolist()) for single in ended.values()}) > 4


def test_abandoned_rows_are_forgotten(model: Any, tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir)
    rollout = engine(model)
    whole = rollout.generate_sequences(prompts)
    assert len(rollout.generate_some(named(prompts, 0.1))) < len(prompts)
    rollout.abandon()
    assert_equal_rows(stream(rollout, prompts, [8])[0], whole)


def test_layers_with_a_window_let_rows_join_when_all_have_ended(tiny_model_dir: Path) -> None:
    config = MistralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=16, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config)
    rollout = engine(model)
    prompts = prompt_batch(tiny_model_dir, repeat=2)
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    sampling = SamplingParams(do_sample=False, max_new_tokens=LENGTH, ignore_eos=True)
    ours = rollout.generate(ids, mask, prompts.batch["sampling_seed"], sampling).tokens
    theirs = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1)
    assert torch.equal(ours, theirs[:, ids.shape[1] :])
    whole = rollout.generate_sequences(prompts)
    ended, _ = stream(rollout, named(prompts, 0.25), [3, 13])
    for row, single in ended.items():
        assert torch.equal(single.batch["responses"][0], whole.batch["responses"][row])


def test_ended_rows_ask_for_no_position_beyond_the_last(tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir, repeat=3)
    longest = int(prompts.batch["attention_mask"].sum(dim=1).max()) + LENGTH
    size = int(prompts.batch["input_ids"].max()) + 1
    torch.manual_seed(0)
    # Learned positions: a table that has no entry for one more.
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=longest, n_embd=32, n_layer=2, n_head=2)).eval()
    whole = engine(learned).generate_sequences(prompts)
    ended, _ = stream(engine(learned, max_num_seqs=6), named(prompts, 0.1), [5, 3, 0, 9, 7])
    assert_equal_rows(ended, whole)
