# SPDX-License-Identifier: Apache-2.0
"""What vLLM samples, with which seeds, where it ends, and what it reports about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.verl.workers.support import RESPONSE_LENGTH, prompt_batch
from verl.protocol import DataProto
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.sampling import SamplingParams, token_log_probs
from verl.workers.rollout.session import rollout_session
from verl.workers.rollout.vllm_rollout import VLLMRollout

pytestmark = pytest.mark.vllm

MANY_ENDS = tuple(range(2, 40))


@pytest.fixture
def engine(make_policy: Callable[[str], Any]) -> Iterator[VLLMRollout]:
    """The engine of the tied model inside a session; settings that a test changes are put back."""
    group = make_policy("tied")
    engine = group.worker.rollout
    before = dict(vars(engine))
    with rollout_session(group, group.rollout_version()[0] + 1):
        yield engine
    for name in ("config", "fields", "eos_token_ids", "processed_log_probs"):
        setattr(engine, name, before[name])


@pytest.fixture
def twin(make_policy: Callable[[str], Any], tmp_path: Path) -> HFRollout:
    """An HF engine with the same weights and settings."""
    group = make_policy("tied")
    group.export_hf(tmp_path / "twin")
    engine = group.worker.rollout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "twin")
    return HFRollout(model, engine.config, eos_token_ids=engine.eos_token_ids, pad_token_id=engine.pad_token_id)


def response_mask(out: DataProto) -> torch.Tensor:
    return out.batch["attention_mask"][:, -RESPONSE_LENGTH:].bool()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_columns_and_ends_are_those_of_the_hf_engine(
    engine: VLLMRollout, twin: HFRollout, model_dirs: dict[str, Path], ignore_eos: bool
) -> None:
    prompts = prompt_batch(model_dirs["tied"])
    prompts.meta_info["do_sample"] = False
    for one in (engine, twin):
        one.eos_token_ids = MANY_ENDS
        one.config = replace(one.config, ignore_eos=ignore_eos)
    ours, theirs = engine.generate_sequences(prompts).batch, twin.generate_sequences(prompts).batch
    # How close a draw was is more than vLLM tells.
    assert set(ours.keys()) == set(theirs.keys()) - {"close_draws"}
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids"):
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name
    assert torch.allclose(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-4)
    lengths = ours["attention_mask"][:, -RESPONSE_LENGTH:].sum(dim=1)
    assert bool((lengths == RESPONSE_LENGTH).all()) == ignore_eos


def test_a_row_depends_on_its_seed_and_nothing_else(engine: VLLMRollout, model_dirs: dict[str, Path]) -> None:
    prompts = prompt_batch(model_dirs["tied"], repeat=2)
    engine.eos_token_ids = MANY_ENDS
    whole = engine.generate_sequences(prompts).batch["responses"]
    assert torch.equal(whole, engine.generate_sequences(prompts).batch["responses"])
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1))
    assert torch.equal(engine.generate_sequences(prompts[order]).batch["responses"], whole[order])
    for part in (slice(0, 1), slice(5, 12)):
        assert torch.equal(engine.generate_sequences(prompts[part]).batch["responses"], whole[part])


def test_every_bit_of_a_seed_counts(engine: VLLMRollout, model_dirs: dict[str, Path]) -> None:
    prompts = prompt_batch(model_dirs["tied"])
    prompts.batch["input_ids"][:] = prompts.batch["input_ids"][1]
    prompts.batch["attention_mask"][:] = prompts.batch["attention_mask"][1]
    prompts.batch["sampling_seed"] = torch.tensor([0, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 2])
    rows = engine.generate_sequences(prompts).batch["responses"].tolist()
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.6, "top_k": 20}, {"top_p": 0.8}])
def test_log_probs_are_of_the_distribution_sampled_from(
    engine: VLLMRollout, twin: HFRollout, model_dirs: dict[str, Path], sampling: dict[str, float]
) -> None:
    prompts = prompt_batch(model_dirs["tied"])
    prompts.meta_info.update(sampling)
    out = engine.generate_sequences(prompts)
    batch = out.batch
    with torch.no_grad():
        logits = twin.module(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits[:, -RESPONSE_LENGTH - 1 : -1]
    expected = token_log_probs(logits.flatten(0, 1), SamplingParams(**sampling))  # type: ignore[arg-type]
    expected = expected.gather(1, batch["responses"].reshape(-1, 1)).view(batch["responses"].shape)
    mask = response_mask(out)
    assert torch.allclose(batch["rollout_log_probs"][mask], expected[mask], atol=1e-4)
    assert (batch["rollout_log_probs"][~mask] == -1).all()


def test_without_processed_log_probs_there_are_none_away_from_the_model_s_own(
    engine: VLLMRollout, model_dirs: dict[str, Path]
) -> None:
    engine.processed_log_probs = False
    prompts = prompt_batch(model_dirs["tied"])
    assert "rollout_log_probs" in engine.generate_sequences(prompts).batch
    for change in ({"temperature": 0.9}, {"top_k": 5}, {"top_p": 0.9}):
        prompts.meta_info = dict(change)
        assert "rollout_log_probs" not in engine.generate_sequences(prompts).batch


def test_fields_of_vllm_s_own_sampling(engine: VLLMRollout, twin: HFRollout, model_dirs: dict[str, Path]) -> None:
    prompts = prompt_batch(model_dirs["tied"])
    prompts.meta_info["do_sample"] = False
    greedy = twin.generate_sequences(prompts).batch["responses"]
    prompts.meta_info.clear()
    # Only the most likely token survives a min_p of 1.
    engine.fields = {"min_p": 1.0}
    assert torch.equal(engine.generate_sequences(prompts).batch["responses"], greedy)
    engine.fields = {}
    stop = int(greedy[0, 2])
    engine.config = replace(engine.config, stop_token_ids=(stop,))
    prompts.meta_info["do_sample"] = False
    out = engine.generate_sequences(prompts)
    length = int(response_mask(out)[0].sum())
    assert length == greedy[0].tolist().index(stop) + 1 and out.batch["responses"][0, length - 1] == stop
    engine.config = replace(engine.config, stop_token_ids=None)
    engine.eos_token_ids = (stop,)
    engine.fields = {"min_tokens": RESPONSE_LENGTH}
    assert response_mask(engine.generate_sequences(prompts)).all()


def test_rows_that_join_and_leave_are_the_same(engine: VLLMRollout, model_dirs: dict[str, Path]) -> None:
    prompts = prompt_batch(model_dirs["tied"], repeat=2)
    engine.eos_token_ids = MANY_ENDS
    whole = engine.generate_sequences(prompts).batch
    prompts.batch["row"] = torch.arange(len(prompts)) + 5
    prompts.meta_info["share"] = 0.3
    asked = list(prompts.chunk(4)) + [prompts[:0]] * len(prompts)
    answers = [engine.generate_some(part).batch for part in asked]
    assert len(answers[0]["row"]) < len(asked[0]), "nothing was left under way, so this shows nothing"
    rows = torch.cat([answer["row"] for answer in answers])
    assert rows.sort().values.tolist() == prompts.batch["row"].tolist()
    for name in ("responses", "attention_mask", "rollout_log_probs"):
        ours = torch.cat([answer[name] for answer in answers])[rows.argsort()]
        assert torch.allclose(ours.float(), whole[name].float(), atol=1e-4), name
    # What was given up does not come back.
    prompts.meta_info["share"] = 0.1
    engine.generate_some(prompts)
    engine.abandon()
    assert len(engine.generate_some(prompts[:0]).batch["row"]) == 0
    assert torch.equal(engine.generate_sequences(prompts).batch["responses"], whole["responses"])
