# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.verl.workers.support import RESPONSE_LENGTH, make_group, prompt_batch, training_batch, worker_config
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.actor.dp_actor import score_responses
from verl.workers.batching import MicroBatching
from verl.workers.rollout.session import rollout_session

R = RESPONSE_LENGTH


@pytest.fixture(scope="module")
def group(tiny_model_dir: Path) -> LocalWorkerGroup:
    return make_group(worker_config(tiny_model_dir))


def scores(group: LocalWorkerGroup, batch: DataProto) -> tuple[Tensor, Tensor]:
    out = group.compute_log_prob(batch).batch
    return out["old_log_probs"], out["entropys"]


def test_equal_to_the_plain_model(group: LocalWorkerGroup, tiny_model_dir: Path) -> None:
    batch = training_batch(10, tiny_model_dir, temperature=0.7)
    columns = batch.batch
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        positions = torch.clip(columns["attention_mask"].cumsum(1) - 1, min=0)
        logits = model(
            input_ids=columns["input_ids"], attention_mask=columns["attention_mask"], position_ids=positions
        ).logits[:, -R - 1 : -1]
    distribution = torch.log_softmax(logits / 0.7, dim=-1)
    expected = distribution.gather(2, columns["responses"][..., None])[..., 0] * columns["response_mask"]
    entropy = -(distribution.exp() * distribution).sum(-1) * columns["response_mask"]
    log_probs, entropys = scores(group, batch)
    assert torch.allclose(log_probs, expected, atol=1e-4)
    assert torch.allclose(entropys, entropy, atol=1e-4)
    assert (log_probs[columns["response_mask"] == 0] == 0).all()


def test_padding_order_and_micro_batches_do_not_matter(group: LocalWorkerGroup, tiny_model_dir: Path) -> None:
    batch = training_batch(10, tiny_model_dir)
    expected, expected_entropy = scores(group, batch)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    shuffled, shuffled_entropy = scores(group, batch[order])
    assert torch.allclose(shuffled, expected[order], atol=1e-4)
    assert torch.allclose(shuffled_entropy, expected_entropy[order], atol=1e-4)

    columns = batch.batch
    pad = torch.nn.functional.pad
    left, right = 17, 5
    padded = DataProto.from_dict(
        {
            "input_ids": pad(columns["input_ids"], (left, right)),
            "attention_mask": pad(columns["attention_mask"], (left, right)),
            "responses": pad(columns["responses"], (0, right)),
            "response_mask": pad(columns["response_mask"], (0, right)),
        }
    )
    assert torch.allclose(scores(group, padded)[0][:, :R], expected, atol=1e-4)

    shortest = int(columns["attention_mask"].argmax(dim=1).min())
    trimmed = DataProto.from_dict(
        {name: columns[name][:, shortest:] for name in ("input_ids", "attention_mask")}
        | {"responses": columns["responses"]}
    )
    assert torch.allclose(scores(group, trimmed)[0], expected, atol=1e-4)

    actor = group.worker.actor
    usual = actor.score_batching
    for batching in (MicroBatching(rows=1), MicroBatching(rows=7), MicroBatching(max_tokens=130)):
        actor.score_batching = batching
        log_probs, entropys = scores(group, batch)
        assert torch.allclose(log_probs, expected, atol=1e-5)
        assert torch.allclose(entropys, expected_entropy, atol=1e-5)
    actor.score_batching = usual


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_packed_equals_padded(group: LocalWorkerGroup, tiny_model_dir: Path, strategy: str) -> None:
    packed = make_group(
        worker_config(tiny_model_dir, actor={"strategy": strategy}, model={"use_remove_padding": True}), "actor"
    )
    batch = training_batch(10, tiny_model_dir, temperature=0.9)
    shapes = []
    embedding = packed.worker.actor_model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    packed.compute_log_prob(batch)
    lengths = batch.batch["attention_mask"].sum(dim=1)
    assert {rows for rows, _ in shapes} == {1}
    assert sum(width for _, width in shapes) == int(lengths.sum())
    for ours, theirs in zip(scores(packed, batch), scores(group, batch)):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rollout_log_probs_are_the_policy_s_and_the_first_ratio_is_one(
    group: LocalWorkerGroup, tiny_model_dir: Path, temperature: float
) -> None:
    prompts = prompt_batch(tiny_model_dir, repeat=2)
    prompts.meta_info["temperature"] = temperature
    version = group.rollout_version()[0] + 1
    with rollout_session(group, version):
        batch = group.generate_sequences(prompts)
    batch.meta_info["temperature"] = temperature
    mask = batch.batch["attention_mask"][:, -R:].bool()
    old = group.compute_log_prob(batch).batch["old_log_probs"]
    assert float((old - batch.batch["rollout_log_probs"])[mask].abs().max()) < 1e-3
    # The update runs other micro-batches, with gradients and in training mode.
    worker = group.worker
    worker.actor_model.train()
    new = score_responses(
        worker.actor.forward, batch.batch["input_ids"], batch.batch["attention_mask"], mask, temperature=temperature
    ).log_probs
    assert new.requires_grad
    assert float((torch.exp(new.detach() - old) - 1)[mask].abs().max()) < 1e-4


def test_only_real_tokens_are_run(tiny_model_dir: Path) -> None:
    group = make_group(worker_config(tiny_model_dir), "actor")
    batch = training_batch(8, tiny_model_dir)
    shapes, logits = [], []
    model = group.worker.actor_model
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: logits.append(out.shape[-2]))
    group.compute_log_prob(batch)
    lengths = batch.batch["attention_mask"].sum(dim=1).sort().values
    assert shapes == [(4, int(lengths[3])), (4, int(lengths[7]))]
    assert sum(logits) == int(batch.batch["response_mask"].sum())


def test_reference_policy_scores_like_the_policy_it_was_loaded_from(
    group: LocalWorkerGroup, tiny_model_dir: Path
) -> None:
    reference = make_group(worker_config(tiny_model_dir), "ref")
    batch = training_batch(8, tiny_model_dir)
    expected, _ = scores(group, batch)
    assert torch.allclose(reference.compute_ref_log_prob(batch).batch["ref_log_prob"], expected, atol=1e-5)
    assert not any(p.requires_grad for p in reference.worker.ref_model.parameters())


def test_a_row_over_the_token_budget_is_named() -> None:
    with pytest.raises(ValueError, match="row of 40 tokens is over the budget of 30"):
        MicroBatching(max_tokens=30).split([20, 40, 10])
    with pytest.raises(ValueError, match="micro-batch size"):
        MicroBatching().split([1])
