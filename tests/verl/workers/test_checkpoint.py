# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import make_tiny_model
from tests.verl.workers.support import (
    RESPONSE_LENGTH,
    largest_difference,
    make_group,
    prompt_batch,
    training_batch,
    weights_of,
    worker_config,
)
from verl.trainer.config.model_sections import OptimConfig
from verl.trainer.config.worker_sections import ActorRolloutRefConfig
from verl.utils.checkpoint import find_latest_ckpt_path, get_checkpoint_tracker_filename
from verl.utils.errors import UserError
from verl.workers.rollout.session import rollout_session


def scheduled(path: Path, strategy: str) -> ActorRolloutRefConfig:
    config = worker_config(path, actor={"strategy": strategy})
    optim = OptimConfig(lr=1e-3, warmup_style="cosine", lr_warmup_steps=1, total_training_steps=10)
    return replace(config, actor=replace(config.actor, optim=optim))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_restored_worker_goes_on_bit_for_bit(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    config = scheduled(tiny_model_dir, strategy)
    batches = [training_batch(8, tiny_model_dir, seed=seed) for seed in range(4)]
    first = make_group(config)
    for batch in batches[:2]:
        first.update_actor(batch)
    first.save_checkpoint(tmp_path / "actor", 2)
    drawn = (torch.rand(3), np.random.rand(3), random.random())
    draws_without_seed = first.worker.rollout.seed_generator.get_state()

    second = make_group(config)
    second.update_actor(batches[3])  # the restored state replaces this one
    torch.rand(17)
    second.worker.rollout.seed_generator.manual_seed(99)
    second.load_checkpoint(tmp_path / "actor")
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])
    assert random.random() == drawn[2]
    assert torch.equal(second.worker.rollout.seed_generator.get_state(), draws_without_seed)
    assert largest_difference(weights_of(first.worker), weights_of(second.worker)) == 0.0
    assert second.worker.lr_scheduler.state_dict() == first.worker.lr_scheduler.state_dict()
    ours, theirs = (group.worker.optimizer.state_dict()["state"] for group in (first, second))
    for number in ours:
        for key, value in ours[number].items():
            assert torch.equal(_local(value), _local(theirs[number][key])), (number, key)

    for batch in batches[2:]:
        expected = first.update_actor(batch).meta_info["metrics"]
        restored = second.update_actor(batch).meta_info["metrics"]
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr"):
            assert restored[name] == expected[name]
    assert largest_difference(weights_of(first.worker), weights_of(second.worker)) == 0.0
    prompts = prompt_batch(tiny_model_dir)
    responses = []
    for group in (first, second):
        with rollout_session(group, 5):
            responses.append(group.generate_sequences(prompts).batch["responses"])
    assert torch.equal(*responses)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_saving_before_the_first_step_changes_nothing(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    config = worker_config(tiny_model_dir, actor={"strategy": strategy})
    batch = training_batch(8, tiny_model_dir)
    plain, saved, restored = (make_group(config) for _ in range(3))
    saved.save_checkpoint(tmp_path / "actor", 0)
    restored.update_actor(training_batch(8, tiny_model_dir, seed=5))
    restored.load_checkpoint(tmp_path / "actor")
    for group in (plain, saved, restored):
        group.update_actor(batch)
    assert largest_difference(weights_of(plain.worker), weights_of(saved.worker)) == 0.0
    assert largest_difference(weights_of(plain.worker), weights_of(restored.worker)) == 0.0


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_saved_folder_loads_with_the_library(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    group = make_group(worker_config(tiny_model_dir, actor={"strategy": strategy}))
    batch = training_batch(8, tiny_model_dir)
    group.compute_log_prob(batch)
    group.update_actor(batch)
    group.save_checkpoint(tmp_path / "actor", 1)
    names = {path.name for path in (tmp_path / "actor").iterdir()}
    assert {f"{kind}_world_size_1_rank_0.pt" for kind in ("model", "optim", "extra_state")} <= names
    assert {"config.json", "generation_config.json", "tokenizer.json", "huggingface"} <= names
    group.export_hf(tmp_path / "export")

    trained = group.compute_log_prob(batch).batch["old_log_probs"]
    columns = batch.batch
    for folder in (tmp_path / "actor" / "huggingface", tmp_path / "export"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert type(model).__name__ == "Qwen2ForCausalLM"
        assert model.config.architectures == ["Qwen2ForCausalLM"]
        assert model.config.tie_word_embeddings and model.dtype == torch.float32
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
        assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        state = model.state_dict()
        for name, weight in weights_of(group.worker).items():
            assert torch.equal(state[name], weight), name
        with torch.no_grad():
            positions = torch.clip(columns["attention_mask"].cumsum(1) - 1, min=0)
            logits = model(
                input_ids=columns["input_ids"], attention_mask=columns["attention_mask"], position_ids=positions
            ).logits[:, -RESPONSE_LENGTH - 1 : -1]
        chosen = torch.log_softmax(logits, -1).gather(2, columns["responses"][..., None])[..., 0]
        assert torch.allclose(chosen * columns["response_mask"], trained, atol=1e-5)
    # A worker starts from the folder, too.
    again = make_group(worker_config(tmp_path / "export", actor={"strategy": strategy}))
    assert torch.allclose(again.compute_log_prob(batch).batch["old_log_probs"], trained, atol=1e-5)


def test_folders_that_cannot_be_restored_are_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    group = make_group(worker_config(tiny_model_dir), "actor")
    before = weights_of(group.worker)
    with pytest.raises(UserError, match=r"model_world_size_1_rank_0\.pt is missing \(no such file\)"):
        group.load_checkpoint(tmp_path)
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"")
    with pytest.raises(UserError, match="another number of ranks"):
        group.load_checkpoint(tmp_path)
    group.load_checkpoint(None)
    assert largest_difference(weights_of(group.worker), before) == 0.0


class _Payload:
    """Unpickled, it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_damaged_files_are_named_and_nothing_in_them_runs(tiny_model_dir: Path, tmp_path: Path, kind: str) -> None:
    group = make_group(worker_config(tiny_model_dir), "actor")
    group.update_actor(training_batch(8, tiny_model_dir))
    group.save_checkpoint(tmp_path, 1)
    file = tmp_path / f"{kind}_world_size_1_rank_0.pt"
    whole = file.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"not a checkpoint"):
        file.write_bytes(broken)
        with pytest.raises(UserError, match=rf"{file.name} cannot be read"):
            group.load_checkpoint(tmp_path)
    torch.save({"weight": _Payload(tmp_path / "made")}, file)
    with pytest.raises(UserError, match=rf"{file.name} cannot be read"):
        group.load_checkpoint(tmp_path)
    assert not (tmp_path / "made").exists()
    file.write_bytes(whole)
    group.load_checkpoint(tmp_path)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_checkpoint_of_another_model_is_refused(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    wider = make_tiny_model(tmp_path / "wider", intermediate_size=96)
    deeper = make_tiny_model(tmp_path / "deeper", num_layers=3)
    group = make_group(worker_config(tiny_model_dir, actor={"strategy": strategy}), "actor")
    before = weights_of(group.worker)
    for path, reason in (
        (wider, r"\(64, 96\) there and \(64, 128\) here"),
        (deeper, r"layers\.2\..* there and missing here"),
    ):
        other = make_group(worker_config(path, actor={"strategy": strategy}), "actor")
        other.save_checkpoint(tmp_path / path.name / "actor", 1)
        with pytest.raises(UserError, match=reason):
            group.load_checkpoint(tmp_path / path.name / "actor")
    assert largest_difference(weights_of(group.worker), before) == 0.0


def test_latest_checkpoint(tmp_path: Path) -> None:
    assert find_latest_ckpt_path(None) is None
    assert find_latest_ckpt_path(str(tmp_path)) is None
    Path(get_checkpoint_tracker_filename(str(tmp_path))).write_text("7\n")
    assert find_latest_ckpt_path(str(tmp_path)) is None
    (tmp_path / "global_step_7").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_7")
