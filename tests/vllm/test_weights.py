# SPDX-License-Identifier: Apache-2.0
"""Weights reach the engine, all of them, and the probe notices when they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.verl.workers.support import RESPONSE_LENGTH, prompt_batch, training_batch
from verl.workers.rollout import vllm_rollout
from verl.workers.rollout.probe import StaleWeightsError
from verl.workers.rollout.session import rollout_session

pytestmark = pytest.mark.vllm

Policies = Callable[[str], Any]


def next_version(group: Any) -> int:
    return group.rollout_version()[0] + 1


@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_after_updates_greedy_output_is_the_library_s(
    make_policy: Policies, model_dirs: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    group, path = make_policy(kind), model_dirs["tied"]
    prompts = prompt_batch(path)
    prompts.meta_info["do_sample"] = False
    answers = []
    for round_ in range(3):
        version = next_version(group)
        with rollout_session(group, version):
            out = group.generate_sequences(prompts)
        assert group.rollout_version() == [version]
        group.export_hf(tmp_path / str(round_))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(round_))
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        theirs = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=RESPONSE_LENGTH, do_sample=False, eos_token_id=2,
            pad_token_id=0,
        )[:, ids.shape[1] :]  # fmt: skip
        assert torch.equal(out.batch["responses"][:, : theirs.shape[1]], theirs)
        sampled = out.batch["attention_mask"][:, -RESPONSE_LENGTH:].bool()
        ours = group.compute_log_prob(out).batch["old_log_probs"]
        assert float((ours - out.batch["rollout_log_probs"])[sampled].abs().max()) < 1e-4
        answers.append(out.batch["responses"])
        group.update_actor(training_batch(8, path, seed=round_))
    # The updates mattered, so a stale engine or a stale cache of prompts would have shown.
    assert not torch.equal(answers[0], answers[-1])


def test_the_probe_names_a_stale_tied_head(make_policy: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_policy("tied")
    group.update_actor(training_batch(8, Path(group.worker.config.model.path)))
    with monkeypatch.context() as patch:
        patch.setattr(vllm_rollout, "_repack_shared", lambda model: None)
        with pytest.raises(StaleWeightsError, match="first part whose output differs is the output head"):
            group.start_rollout(next_version(group))
    with rollout_session(group, next_version(group)):
        pass


@pytest.mark.parametrize(
    ("kind", "dropped", "part"),
    [
        ("tied", "model.layers.1.", "model.layers.1"),
        ("untied", "model.embed_tokens.", "model.embed_tokens"),
        ("untied", "model.norm.", "model.norm"),
        ("untied", "lm_head.", "the output head"),
        ("lora", "model.layers.0.mlp.", "model.layers.0"),
    ],
)
def test_the_probe_names_the_part_whose_weights_are_missing(
    make_policy: Policies, monkeypatch: pytest.MonkeyPatch, kind: str, dropped: str, part: str
) -> None:
    group = make_policy(kind)
    with rollout_session(group, next_version(group)):
        pass
    for seed in range(3):
        group.update_actor(training_batch(8, Path(group.worker.config.model.path), seed=seed))
    engine = group.worker.rollout
    complete = engine.update_weights

    def incomplete(weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        complete(((name, weight) for name, weight in weights if not name.startswith(dropped)), version)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights", incomplete)
        with pytest.raises(StaleWeightsError, match=f"differs is {part}$"):
            group.start_rollout(next_version(group))
    with rollout_session(group, next_version(group)):
        pass


def test_a_sync_that_reaches_nothing_is_noticed(make_policy: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_policy("tied")
    with rollout_session(group, next_version(group)):
        pass
    group.update_actor(training_batch(8, Path(group.worker.config.model.path), seed=5))
    engine = group.worker.rollout

    def nothing(weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert list(weights)
        engine._has_weights, engine.version = True, version

    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights", nothing)
        with pytest.raises(StaleWeightsError, match=r"not the policy's|did not reach"):
            group.start_rollout(next_version(group))


def test_session_rules(make_policy: Policies, model_dirs: dict[str, Path]) -> None:
    group, prompts = make_policy("tied"), prompt_batch(model_dirs["tied"])
    with pytest.raises(RuntimeError, match="rollout_session"):
        group.generate_sequences(prompts)
    with rollout_session(group, next_version(group)):
        group.generate_sequences(prompts)
    with pytest.raises(RuntimeError, match="update_weights comes before"):
        group.worker.rollout.generate_sequences(prompts)
    with pytest.raises(ValueError, match="older"):
        group.start_rollout(group.rollout_version()[0] - 1)
