# SPDX-License-Identifier: Apache-2.0
"""Actor, critic and engine on a CUDA device: the updates of the CPU, offloading, bfloat16, memory given back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.streams import assert_equal_rows, named, stream
from tests.helpers.tiny import make_tiny_model
from tests.verl.workers import reference_update as written_out
from tests.verl.workers.support import (
    RESPONSE_LENGTH,
    largest_difference,
    make_group,
    prompt_batch,
    training_batch,
    use_sgd,
    weights_of,
    worker_config,
)
from tests.verl.workers.test_update_invariants import (
    FLOAT32,
    MINI,
    ROWS,
    VARIANTS,
    close,
    run_actor,
    run_critic,
    value_head,
)
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.config.model_sections import FSDPConfig
from verl.utils.import_utils import is_installed
from verl.workers.rollout.session import rollout_session

DEVICE = "cuda"
# Other kernels, other orders of additions, two optimizer steps on top of each other.
TOLERANCE = 2e-4
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# About 14 M parameters: large enough that weights, not workspaces, decide what is allocated.
SIZE: dict[str, Any] = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "intermediate_size": 1536}
OFFLOAD = {
    "none": FSDPConfig(mixed_precision=FLOAT32),
    "weights and optimizer": FSDPConfig(mixed_precision=FLOAT32, param_offload=True, optimizer_offload=True),
    "policy": FSDPConfig(mixed_precision=FLOAT32, offload_policy=True),
}


@pytest.fixture(scope="module")
def larger_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("larger") / "hf", **SIZE)


def group_on_device(
    path: Path, strategy: str = "fsdp2", role: str = "actor_rollout", **options: Any
) -> LocalWorkerGroup:
    model = options.pop("model", {})
    config = worker_config(path, actor={"strategy": strategy, "ppo_mini_batch_size": 4} | options, model=model)
    return make_group(replace(config, rollout=replace(config.rollout, dtype="float32")), role, DEVICE)


@pytest.mark.parametrize("mode", written_out.LOSS_AGG_MODES)
def test_actor_updates_are_the_written_out_one(tiny_model_dir: Path, mode: str) -> None:
    expected = written_out.actor_update(tiny_model_dir, training_batch(ROWS, tiny_model_dir), MINI, mode)
    for name, variant in VARIANTS.items():
        print(name)
        close(run_actor(tiny_model_dir, variant, mode, DEVICE), expected, "actor", TOLERANCE)


def test_critic_updates_are_the_written_out_one(tiny_model_dir: Path) -> None:
    batch, head = training_batch(ROWS, tiny_model_dir), value_head(tiny_model_dir)
    expected = written_out.critic_update(tiny_model_dir, head, batch, MINI, "token-mean")
    for name, variant in VARIANTS.items():
        print(name)
        close(run_critic(tiny_model_dir, variant, "token-mean", DEVICE), expected, "critic", TOLERANCE)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_offloading_changes_where_things_are_and_nothing_else(tiny_model_dir: Path, strategy: str) -> None:
    batch = training_batch(8, tiny_model_dir)
    results = {}
    for name, fsdp_config in OFFLOAD.items():
        group = group_on_device(tiny_model_dir, strategy, fsdp_config=fsdp_config)
        worker = group.worker
        for version in (1, 2):
            with rollout_session(group, version):
                responses = group.generate_sequences(prompt_batch(tiny_model_dir)).batch["responses"]
            group.update_actor(batch)
        where = {parameter.device.type for parameter in worker.actor_model.parameters()}
        moments = [v for state in worker.optimizer.state.values() for k, v in state.items() if k != "step"]
        expected = DEVICE if name == "none" else "cpu"
        assert where == {moment.device.type for moment in moments} == {expected}, name
        with worker.memory.on_device():
            results[name] = (weights_of(worker), responses)
    for name, (weights, responses) in results.items():
        assert largest_difference(weights, results["none"][0]) < TOLERANCE, name
        assert torch.equal(responses, results["none"][1]), name


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_bfloat16_follows_float32(tiny_model_dir: Path, strategy: str) -> None:
    batch = training_batch(8, tiny_model_dir)
    exact = group_on_device(tiny_model_dir, strategy, "actor", fsdp_config=OFFLOAD["none"])
    reference = exact.compute_log_prob(batch).batch["old_log_probs"]
    for packed in (False, True):
        group = group_on_device(tiny_model_dir, strategy, "actor", model={"use_remove_padding": packed})
        assert {p.dtype for p in group.worker.actor_model.parameters()} == {torch.float32}
        log_probs = group.compute_log_prob(batch).batch["old_log_probs"]
        assert log_probs.dtype == torch.float32
        assert float((log_probs - reference).abs().max()) < 0.2
        before = weights_of(group.worker)
        metrics = group.update_actor(batch).meta_info["metrics"]
        assert metrics["actor/skipped_steps"] == 0.0 < metrics["actor/grad_norm"]
        assert 0.0 < largest_difference(weights_of(group.worker), before) < 0.1
        assert metrics["perf/max_memory_allocated_gb"] > 0


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_memory_is_given_back(larger_model_dir: Path, strategy: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    group = group_on_device(larger_model_dir, strategy, fsdp_config=OFFLOAD["none"])
    group.update_actor(training_batch(8, larger_model_dir))
    resident = torch.cuda.memory_allocated() - before
    weights = sum(p.numel() * p.element_size() for p in group.worker.actor_model.parameters())
    assert resident >= 3 * weights  # weights and two moments
    with rollout_session(group, 1):
        group.generate_sequences(prompt_batch(larger_model_dir))
        assert torch.cuda.memory_allocated() - before >= resident
    assert torch.cuda.memory_allocated() - before <= resident + 0.1 * weights
    group.release_device_memory()
    assert torch.cuda.memory_allocated() - before <= 0.2 * weights
    group.restore_device_memory()
    assert torch.cuda.memory_allocated() - before >= 3 * weights
    group.update_actor(training_batch(8, larger_model_dir))


def test_generation_and_log_probs_agree(tiny_model_dir: Path) -> None:
    group = group_on_device(tiny_model_dir, fsdp_config=OFFLOAD["none"])
    with rollout_session(group, 1):
        batch = group.generate_sequences(prompt_batch(tiny_model_dir, repeat=2))
    batch.meta_info["temperature"] = 1.0
    mask = batch.batch["attention_mask"][:, -RESPONSE_LENGTH:].bool()
    difference = group.compute_log_prob(batch).batch["old_log_probs"] - batch.batch["rollout_log_probs"]
    assert float(difference[mask].abs().max()) < 1e-3


def test_rows_that_join_sample_what_they_sample_together(tiny_model_dir: Path) -> None:
    group = group_on_device(tiny_model_dir, fsdp_config=OFFLOAD["none"])
    prompts = prompt_batch(tiny_model_dir, repeat=2)
    with rollout_session(group, 1):
        whole = group.generate_sequences(prompts)
        ended, counts = stream(group.worker.rollout, named(prompts, 0.25), [1, 5, 0, 7, 3])
    assert_equal_rows(ended, whole)
    assert sum(counts) == len(whole)


def test_a_bfloat16_engine_passes_the_probe_and_samples_from_the_policy(tiny_model_dir: Path) -> None:
    config = worker_config(tiny_model_dir, actor={"strategy": "fsdp2", "ppo_mini_batch_size": 4})
    group = make_group(replace(config, rollout=replace(config.rollout, dtype="bfloat16")), "actor_rollout", DEVICE)
    assert group.worker.rollout.dtype == torch.bfloat16
    for version in (1, 2):
        with rollout_session(group, version):
            batch = group.generate_sequences(prompt_batch(tiny_model_dir, repeat=2))
        batch.meta_info["temperature"] = 1.0
        mask = batch.batch["attention_mask"][:, -RESPONSE_LENGTH:].bool()
        difference = group.compute_log_prob(batch).batch["old_log_probs"] - batch.batch["rollout_log_probs"]
        assert float(difference[mask].abs().mean()) < 0.05
        group.update_actor(training_batch(8, tiny_model_dir))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_restored_worker_goes_on_bit_for_bit(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    batches = [training_batch(8, tiny_model_dir, seed=seed) for seed in range(3)]
    first, second = (group_on_device(tiny_model_dir, strategy, "actor") for _ in range(2))
    first.update_actor(batches[0])
    first.save_checkpoint(tmp_path / "actor", 1)
    second.update_actor(batches[2])
    second.load_checkpoint(tmp_path / "actor")
    for group in (first, second):
        group.update_actor(batches[1])
    assert largest_difference(weights_of(first.worker), weights_of(second.worker)) < 1e-6


@pytest.mark.skipif(not is_installed("peft"), reason="peft is not installed")
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_adapters(tiny_model_dir: Path, tmp_path: Path, strategy: str) -> None:
    group = group_on_device(tiny_model_dir, strategy, fsdp_config=OFFLOAD["none"], model={"lora_rank": 4})
    batch = training_batch(8, tiny_model_dir)
    reference = group.compute_log_prob(batch).batch["old_log_probs"]
    use_sgd(group.worker)
    group.update_actor(batch)
    assert float((group.compute_log_prob(batch).batch["old_log_probs"] - reference).abs().max()) > 1e-3
    assert torch.allclose(group.compute_ref_log_prob(batch).batch["ref_log_prob"], reference, atol=1e-5)
    with rollout_session(group, 1):
        rows = group.generate_sequences(prompt_batch(tiny_model_dir))
    rows.meta_info["temperature"] = 1.0
    mask = rows.batch["attention_mask"][:, -RESPONSE_LENGTH:].bool()
    difference = group.compute_log_prob(rows).batch["old_log_probs"] - rows.batch["rollout_log_probs"]
    assert float(difference[mask].abs().max()) < 1e-3


@pytest.mark.skipif(not is_installed("flash_attn"), reason="flash-attn is not installed")
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attention_equals_sdpa(tiny_model_dir: Path, packed: bool) -> None:
    batch = training_batch(8, tiny_model_dir)
    log_probs = []
    for name in ("flash_attention_2", "sdpa"):
        model = {"use_remove_padding": packed, "override_config": {"attn_implementation": name}}
        group = group_on_device(tiny_model_dir, role="actor", model=model)
        log_probs.append(group.compute_log_prob(batch).batch["old_log_probs"])
    assert float((log_probs[0] - log_probs[1]).abs().max()) < 0.1
