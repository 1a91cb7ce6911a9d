# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.verl.workers.support import RESPONSE_LENGTH, make_group, prompt_batch, training_batch, worker_config
from verl.protocol import DataProto
from verl.trainer.config.model_sections import FSDPConfig
from verl.trainer.config.worker_sections import RolloutConfig
from verl.utils.errors import UserError
from verl.utils.torch_functional import get_response_mask
from verl.workers import model_worker
from verl.workers.model_worker import ModelMemory
from verl.workers.rollout.base import EngineSpec
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.sampling import SamplingParams
from verl.workers.rollout.session import rollout_session

EOS = 2


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


def engine(model: AutoModelForCausalLM, *, eos: tuple[int, ...] = (EOS,), length: int = RESPONSE_LENGTH) -> HFRollout:
    return HFRollout(model, RolloutConfig(response_length=length), eos_token_ids=eos, pad_token_id=0)


def test_output_columns(model: AutoModelForCausalLM, tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir, repeat=4)
    many_ends = tuple(range(2, 40))
    out = engine(model, eos=many_ends).generate_sequences(prompts).batch
    rows, width = prompts.batch["input_ids"].shape
    assert torch.equal(out["prompts"], prompts.batch["input_ids"])
    assert torch.equal(out["input_ids"], torch.cat([out["prompts"], out["responses"]], dim=1))
    mask = out["attention_mask"][:, width:]
    assert torch.equal(mask, get_response_mask(out["responses"], many_ends) * (out["rollout_log_probs"] != -1))
    lengths = mask.sum(dim=1)
    assert lengths.min() >= 1 and lengths.min() < lengths.max()
    for row in range(rows):
        sampled = out["responses"][row, : lengths[row]].tolist()
        ends = [token for token in sampled if token in many_ends]
        # The mask holds exactly one end token and it is the last, unless the length ran out.
        assert ends == sampled[-1:] or (not ends and lengths[row] == RESPONSE_LENGTH)
        assert (out["responses"][row, lengths[row] :] == 0).all()
        assert (out["rollout_log_probs"][row, : lengths[row]] <= 0).all()
        assert (out["rollout_log_probs"][row, lengths[row] :] == -1).all()
    positions = out["position_ids"]
    expected = torch.clip(prompts.batch["attention_mask"].cumsum(1) - 1, min=0)
    assert torch.equal(positions[:, :width], expected)
    assert torch.equal(positions[:, width:], expected[:, -1:] + 1 + torch.arange(RESPONSE_LENGTH))


def test_greedy_equals_the_library_s_own_generation(model: AutoModelForCausalLM, tiny_model_dir: Path) -> None:
    batch = prompt_batch(tiny_model_dir).batch
    sampling = SamplingParams(do_sample=False, max_new_tokens=RESPONSE_LENGTH)
    ours = engine(model).generate(batch["input_ids"], batch["attention_mask"], batch["sampling_seed"], sampling)
    theirs = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=RESPONSE_LENGTH,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
    )[:, batch["input_ids"].shape[1] :]
    assert torch.equal(ours.tokens[:, : theirs.shape[1]], theirs)


def test_tokens_do_not_depend_on_the_rest_of_the_batch(model: AutoModelForCausalLM, tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir, repeat=3)
    rollout = engine(model, eos=tuple(range(2, 20)))
    whole = rollout.generate_sequences(prompts).batch
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1))
    shuffled = rollout.generate_sequences(prompts[order]).batch
    assert torch.equal(shuffled["responses"], whole["responses"][order])
    assert torch.allclose(shuffled["rollout_log_probs"], whole["rollout_log_probs"][order], atol=1e-4)
    for part in (slice(0, 1), slice(3, 10), slice(20, 24)):
        assert torch.equal(rollout.generate_sequences(prompts[part]).batch["responses"], whole["responses"][part])
    narrow = prompts[:8]
    wide = DataProto.from_dict(
        {
            "input_ids": torch.nn.functional.pad(narrow.batch["input_ids"], (30, 0)),
            "attention_mask": torch.nn.functional.pad(narrow.batch["attention_mask"], (30, 0)),
            "sampling_seed": narrow.batch["sampling_seed"],
        }
    )
    assert torch.equal(rollout.generate_sequences(wide).batch["responses"], whole["responses"][:8])


def test_prefill_blocks_change_nothing(model: AutoModelForCausalLM, tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir, repeat=2)
    rollout = engine(model)
    whole = rollout.generate_sequences(prompts).batch
    rollout.prefill_tokens = 60
    blocks = rollout.generate_sequences(prompts).batch
    assert torch.equal(blocks["responses"], whole["responses"])
    assert torch.allclose(blocks["rollout_log_probs"], whole["rollout_log_probs"], atol=1e-4)


def test_seeds_decide(model: AutoModelForCausalLM, tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir)
    rollout = engine(model)
    first = rollout.generate_sequences(prompts).batch["responses"]
    assert torch.equal(first, rollout.generate_sequences(prompts).batch["responses"])
    prompts.batch["sampling_seed"] = prompts.batch["sampling_seed"] + 1
    assert (rollout.generate_sequences(prompts).batch["responses"] != first).any(dim=1).all()
    unseeded = prompts.select(batch_keys=["input_ids", "attention_mask"])
    again = [engine(model).generate_sequences(unseeded).batch["responses"] for _ in range(2)]
    assert torch.equal(again[0], again[1])


def test_long_responses_outgrow_the_key_value_buffer(model: AutoModelForCausalLM, tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir)
    prompts.meta_info["do_sample"] = False
    out = engine(model, eos=(), length=80).generate_sequences(prompts).batch
    with torch.no_grad():
        logits = model(
            input_ids=out["input_ids"], attention_mask=out["attention_mask"], position_ids=out["position_ids"]
        ).logits[:, -81:-1]
    recomputed = torch.log_softmax(logits, -1).gather(2, out["responses"][..., None])[..., 0]
    assert torch.allclose(recomputed, out["rollout_log_probs"], atol=1e-3)


def test_a_prompt_without_tokens_is_refused(model: AutoModelForCausalLM, tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir)
    prompts.batch["attention_mask"][3] = 0
    with pytest.raises(ValueError, match="prompt without tokens"):
        engine(model).generate_sequences(prompts)


@pytest.mark.parametrize(
    "actor",
    [
        {"strategy": "fsdp"},
        {"strategy": "fsdp2"},
        {"strategy": "fsdp2", "fsdp_config": FSDPConfig(reshard_after_forward=False)},
    ],
)
def test_engine_follows_the_policy_once_per_session(tiny_model_dir: Path, actor: dict[str, Any]) -> None:
    group = make_group(worker_config(tiny_model_dir, actor=actor))
    prompts = prompt_batch(tiny_model_dir)
    with pytest.raises(RuntimeError, match="rollout_session"):
        group.generate_sequences(prompts)
    assert group.rollout_version() == [-1]
    with rollout_session(group, 1):
        before = group.generate_sequences(prompts)
    assert group.rollout_version() == [1]
    # Between sessions the engine holds no memory for weights.
    assert all(p.numel() == 0 for p in group.worker.rollout.module.parameters())
    batch = training_batch(8, tiny_model_dir)
    group.compute_log_prob(batch)
    metrics = group.update_actor(batch).meta_info["metrics"]
    assert metrics["actor/skipped_steps"] == 0
    with rollout_session(group, 2):
        after = group.generate_sequences(prompts)
    assert group.rollout_version() == [2]
    old = group.compute_log_prob(before).batch["old_log_probs"]
    new = group.compute_log_prob(after).batch["old_log_probs"]
    columns = slice(-RESPONSE_LENGTH, None)
    mask_old, mask_new = (d.batch["attention_mask"][:, columns].bool() for d in (before, after))
    stale = (before.batch["rollout_log_probs"] - old)[mask_old].abs().max()
    fresh = (after.batch["rollout_log_probs"] - new)[mask_new].abs().max()
    assert stale > 0.01 and fresh < 1e-4
    with pytest.raises(ValueError, match="older"):
        group.start_rollout(1)


def test_missing_or_unknown_weights_are_noticed(model: AutoModelForCausalLM) -> None:
    rollout = engine(model)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    rollout.update_weights(weights.items(), 4)
    assert rollout.version == 4
    some = dict(list(weights.items())[1:])
    with pytest.raises(RuntimeError, match="embed_tokens"):
        rollout.update_weights(some.items(), 5)
    with pytest.raises(RuntimeError, match="no weight 'nothing'"):
        rollout.update_weights({"nothing": torch.zeros(1)}.items(), 5)


def test_released_weights_come_back_with_the_next_update(tiny_model_dir: Path) -> None:
    rollout = engine(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    weights = {name: weight.detach().clone() for name, weight in rollout.module.named_parameters()}
    prompts = prompt_batch(tiny_model_dir)
    before = rollout.generate_sequences(prompts).batch
    rollout.release_weights()
    assert all(p.numel() == 0 for p in rollout.module.parameters())
    with pytest.raises(RuntimeError):
        rollout.generate_sequences(prompts)
    rollout.update_weights(weights.items(), 1)
    after = rollout.generate_sequences(prompts).batch
    assert torch.equal(before["responses"], after["responses"])
    assert torch.equal(before["rollout_log_probs"], after["rollout_log_probs"])
    # Copied, not shared: the engine keeps its weights whatever happens to the ones it was given.
    weights["lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"].zero_()
    assert torch.equal(rollout.generate_sequences(prompts).batch["responses"], after["responses"])


def test_no_more_rows_than_the_limit_are_decoded_at_a_time(tiny_model_dir: Path) -> None:
    prompts = prompt_batch(tiny_model_dir)
    responses = []
    for limit in (1024, 3):
        group = make_group(worker_config(tiny_model_dir, rollout={"max_num_seqs": limit}))
        rows: list[int] = []
        group.worker.rollout.module.register_forward_pre_hook(
            lambda module, args, kwargs, rows=rows: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
        )
        with rollout_session(group, 0):
            responses.append(group.generate_sequences(prompts))
        assert max(rows) <= limit
    for name in ("responses", "attention_mask"):
        assert torch.equal(responses[0].batch[name], responses[1].batch[name])
    log_probs = [out.batch["rollout_log_probs"] for out in responses]
    assert torch.allclose(*log_probs, atol=1e-5)


@pytest.mark.parametrize("offload_policy", [False, True])
def test_memory_moves_optimizer_first_and_never_what_fsdp_fetches_itself(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, offload_policy: bool
) -> None:
    worker = make_group(worker_config(tiny_model_dir)).worker
    fsdp_config = FSDPConfig(offload_policy=offload_policy, param_offload=True)
    worker.memory = ModelMemory(worker.actor_model, worker.optimizer, fsdp_config, torch.device("cuda"))
    moves: list[str] = []
    for name in (
        "offload_fsdp_optimizer",
        "offload_fsdp_model_to_cpu",
        "load_fsdp_model_to_gpu",
        "load_fsdp_optimizer",
    ):
        monkeypatch.setattr(model_worker, name, lambda *_, name=name: moves.append(name))
    worker.release_device_memory()
    worker.restore_device_memory()
    with worker.memory.on_device(optimizer=True):
        moves.append("work")
    expected = [
        "offload_fsdp_optimizer", "offload_fsdp_model_to_cpu", "load_fsdp_optimizer",
        "load_fsdp_model_to_gpu", "work", "offload_fsdp_model_to_cpu",
    ]  # fmt: skip
    assert moves == (["work"] if offload_policy else expected)


def test_messages_for_a_missing_model_and_another_engine(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"actor_rollout_ref\.model\.path=.*nowhere"):
        make_group(worker_config(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"actor_rollout_ref\.model\.path=.*empty"):
        make_group(worker_config(tmp_path / "empty"))
    config = worker_config(tiny_model_dir)
    with pytest.raises(UserError, match=r"rollout\.name=vllm"):
        make_group(replace(config, rollout=replace(config.rollout, name="vllm")))


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_positions_that_depend_on_other_rows_are_refused(tmp_path: Path, scaling: str) -> None:
    rope = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0}
    if scaling == "longrope":
        # One factor for each pair of numbers of a head.
        rope |= {"original_max_position_embeddings": 32, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=32, rope_parameters=rope,
    ).save_pretrained(tmp_path)  # fmt: skip
    for response, refused in ((16, False), (17, True)):
        config = RolloutConfig(prompt_length=16, response_length=response)
        spec = EngineSpec(config, str(tmp_path), torch.device("cpu"), torch.float32, (2,), 0)
        if refused:
            with pytest.raises(UserError, match="at most 32 instead of 33"):
                HFRollout.build(spec)
        else:
            HFRollout.build(spec)
