# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks against one: the same log-probs, updates, responses, exports and restored runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.verl.workers.reference_update import LOSS_AGG_MODES
from tests.verl.workers.support import (
    critic_config,
    fill_head,
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
from verl.single_controller.base.worker import free_port
from verl.trainer.config.model_sections import FSDPConfig
from verl.trainer.config.worker_sections import ActorRolloutRefConfig
from verl.workers.batching import MicroBatching
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from verl.workers.rollout.session import rollout_session

STRATEGIES = ("fsdp", "fsdp2")
HYBRID = (("fsdp", 2), ("fsdp2", 2), ("fsdp", 1), ("fsdp2", 1))
LOSS = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "ppo_mini_batch_size": 8}


def _options(strategy: str) -> dict[str, Any]:
    return dict(LOSS, strategy=strategy, ppo_micro_batch_size_per_gpu=3)


def _unequal_batch(path: Path) -> DataProto:
    # The second rank's rows have far fewer tokens: a mean of the ranks' means would differ.
    batch = training_batch(12, path)
    batch.batch["response_mask"][6:, 2:] = 0
    return batch


def _two_rank_order(batch: DataProto) -> DataProto:
    """Rows so that one rank's mini-batches of 8 hold the same rows as two ranks' mini-batches of 4."""
    return batch[[0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11]]


def _rank_main(rank: int, ranks: int, port: int, model: str, out: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    path, folder = Path(model), Path(out)
    if ranks == 2:
        _actor_on_two_ranks(rank, path, folder)
        _critic_on_two_ranks(rank, path, folder)
        _adapters_on_two_ranks(rank, path, folder)
        _token_budgets_on_two_ranks(rank, path, folder)
    else:
        _hybrid_on_four_ranks(rank, path, folder)
    torch.distributed.destroy_process_group()


def _critic_on_two_ranks(rank: int, path: Path, folder: Path) -> None:
    for strategy in STRATEGIES:
        worker = CriticWorker(critic_config(path, strategy=strategy, ppo_micro_batch_size_per_gpu=3), "cpu")
        worker.init_model()
        fill_head(worker)
        batch = _unequal_batch(path).chunk(2)[rank]
        result: dict[str, Any] = {"values": worker.compute_values(batch).batch["values"]}
        adam = worker.optimizer
        use_sgd(worker)
        result["metrics"] = worker.update_critic(batch).meta_info["metrics"]
        result["weights"] = weights_of(worker)
        worker.optimizer = worker.memory.optimizer = worker.critic.optimizer = adam
        result["resume_difference"] = _resume_difference(worker, batch, folder / f"critic_{strategy}")
        torch.save(result, folder / f"critic_{strategy}_{rank}.pt")


def _adapters_on_two_ranks(rank: int, path: Path, folder: Path) -> None:
    for strategy in STRATEGIES:
        worker = ActorRolloutRefWorker(_adapter_config(path, strategy), "actor_rollout", "cpu")
        worker.init_model()
        batch = _unequal_batch(path).chunk(2)[rank]
        adam = worker.optimizer
        use_sgd(worker)
        worker.update_actor(batch)
        result: dict[str, Any] = {"weights": weights_of(worker)}
        result["log_probs"] = worker.compute_log_prob(batch).batch["old_log_probs"]
        result["reference"] = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
        worker.start_rollout(1)
        result["engine"] = {name: w.clone() for name, w in worker.rollout.module.named_parameters()}
        worker.end_rollout()
        worker.optimizer = worker.memory.optimizer = worker.actor.optimizer = adam
        result["resume_difference"] = _resume_difference(worker, batch, folder / f"lora_{strategy}")
        torch.save(result, folder / f"lora_{strategy}_{rank}.pt")


def _adapter_config(path: Path, strategy: str) -> ActorRolloutRefConfig:
    return worker_config(path, actor=_options(strategy), model={"lora_rank": 4, "lora_alpha": 8})


def _token_budgets_on_two_ranks(rank: int, path: Path, folder: Path) -> None:
    # The first rank's rows are longer: it needs more micro-batches, and the second has to make as many.
    for mode in LOSS_AGG_MODES:
        options = _options("fsdp2") | {"loss_agg_mode": mode}
        worker = ActorRolloutRefWorker(
            worker_config(path, actor=options, model={"use_remove_padding": True}), "actor", "cpu"
        )
        worker.init_model()
        use_sgd(worker)
        worker.actor.updates.batching = MicroBatching(max_tokens=80)
        passes: list[int] = []
        worker.actor_model.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        worker.update_actor(_lengthwise_batch(path).chunk(2)[rank])
        torch.save((weights_of(worker), len(passes)), folder / f"budget_{mode}_{rank}.pt")


def _lengthwise_batch(path: Path) -> DataProto:
    """12 rows, the longest six first."""
    batch = training_batch(12, path)
    return batch[batch.batch["attention_mask"].sum(dim=1).argsort(descending=True)]


def _hybrid_on_four_ranks(rank: int, path: Path, folder: Path) -> None:
    for strategy, size in HYBRID:
        options = _options(strategy) | {"fsdp_config": FSDPConfig(fsdp_size=size)}
        worker = ActorRolloutRefWorker(worker_config(path, actor=options), "actor_rollout", "cpu")
        worker.init_model()
        adam = worker.optimizer
        use_sgd(worker)
        batch = _unequal_batch(path).chunk(4)[rank]
        worker.update_actor(batch)
        result: dict[str, Any] = {"weights": weights_of(worker)}
        worker.start_rollout(1)
        result["engine"] = {name: w.clone() for name, w in worker.rollout.module.named_parameters()}
        worker.end_rollout()
        worker.export_hf(folder / f"{strategy}_{size}_hf")
        worker.optimizer = worker.memory.optimizer = worker.actor.optimizer = adam
        result["resume_difference"] = _resume_difference(worker, batch, folder / f"{strategy}_{size}")
        torch.save(result, folder / f"{strategy}_{size}_{rank}.pt")


def _resume_difference(worker: ActorRolloutRefWorker | CriticWorker, batch: DataProto, folder: Path) -> float:
    """Weights after a restored update against those of the update that went straight on."""
    update = worker.update_critic if isinstance(worker, CriticWorker) else worker.update_actor
    update(batch)
    worker.save_checkpoint(folder, 1)
    update(batch)
    straight = weights_of(worker)
    worker.load_checkpoint(folder)
    update(batch)
    return largest_difference(weights_of(worker), straight)


def _actor_on_two_ranks(rank: int, path: Path, folder: Path) -> None:
    for strategy in STRATEGIES:
        result: dict[str, Any] = {}
        worker = ActorRolloutRefWorker(worker_config(path, actor=_options(strategy)), "actor_rollout", "cpu")
        worker.init_model()
        batch = _unequal_batch(path).chunk(2)[rank]
        result["log_probs"] = worker.compute_log_prob(batch).batch["old_log_probs"]
        worker.start_rollout(0)
        result["responses"] = worker.generate_sequences(prompt_batch(path).chunk(2)[rank]).batch["responses"]
        adam = worker.optimizer
        use_sgd(worker)
        result["metrics"] = worker.update_actor(batch).meta_info["metrics"]
        result["weights"] = weights_of(worker)
        worker.start_rollout(1)
        result["engine"] = {name: w.clone() for name, w in worker.rollout.module.named_parameters()}
        worker.export_hf(folder / f"{strategy}_hf")

        worker.optimizer = worker.memory.optimizer = worker.actor.optimizer = adam
        result["resume_difference"] = _resume_difference(worker, batch, folder / f"{strategy}_checkpoint")
        # A gradient that is not finite on one rank stops the step on both.
        before = weights_of(worker)
        if rank == 1:
            batch.batch["advantages"][:, 0] = torch.inf
        result["skipped"] = worker.update_actor(batch).meta_info["metrics"]["actor/skipped_steps"]
        result["skip_difference"] = largest_difference(weights_of(worker), before)
        torch.save(result, folder / f"{strategy}_{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(_rank_main, args=(2, free_port("127.0.0.1"), str(tiny_model_dir), str(folder)), nprocs=2)
    return folder


def _results(folder: Path, name: str, ranks: int = 2) -> list[Any]:
    return [torch.load(folder / f"{name}_{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_equal_one(tiny_model_dir: Path, two_ranks: Path, strategy: str) -> None:
    ranks = [torch.load(two_ranks / f"{strategy}_{rank}.pt", weights_only=False) for rank in range(2)]
    group = make_group(worker_config(tiny_model_dir, actor=_options(strategy)))
    batch = _unequal_batch(tiny_model_dir)
    log_probs = group.compute_log_prob(batch).batch["old_log_probs"]
    assert torch.allclose(torch.cat([r["log_probs"] for r in ranks]), log_probs, atol=1e-5)

    group.start_rollout(0)
    responses = group.generate_sequences(prompt_batch(tiny_model_dir)).batch["responses"]
    assert torch.equal(torch.cat([r["responses"] for r in ranks]), responses)

    use_sgd(group.worker)
    start = weights_of(group.worker)
    metrics = group.update_actor(_two_rank_order(batch)).meta_info["metrics"]
    weights = weights_of(group.worker)
    assert largest_difference(weights, start) > 1e-2
    for result in ranks:
        assert largest_difference(result["weights"], weights) < 1e-5
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm"):
            assert result["metrics"][name] == pytest.approx(metrics[name], abs=1e-5), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_sync_export_resume_and_skip(two_ranks: Path, strategy: str) -> None:
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(two_ranks / f"{strategy}_hf").state_dict()
    for rank in range(2):
        result = torch.load(two_ranks / f"{strategy}_{rank}.pt", weights_only=False)
        for name, weight in result["weights"].items():
            assert torch.equal(exported[name], weight), name
            if name in result["engine"]:
                assert torch.equal(result["engine"][name], weight), name
        assert result["resume_difference"] == 0.0
        # Both mini-batches are poisoned on rank 1 only.
        assert result["skipped"] == 2
        assert result["skip_difference"] == 0.0
        for kind in ("model", "optim", "extra_state"):
            assert (two_ranks / f"{strategy}_checkpoint" / f"{kind}_world_size_2_rank_{rank}.pt").is_file()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_critic_on_two_ranks_equals_one(tiny_model_dir: Path, two_ranks: Path, strategy: str) -> None:
    ranks = _results(two_ranks, f"critic_{strategy}")
    group = make_critic(critic_config(tiny_model_dir, strategy=strategy, ppo_micro_batch_size_per_gpu=3))
    batch = _unequal_batch(tiny_model_dir)
    values = group.compute_values(batch).batch["values"]
    assert torch.allclose(torch.cat([result["values"] for result in ranks]), values, atol=1e-5)
    use_sgd(group.worker)
    metrics = group.update_critic(_two_rank_order(batch)).meta_info["metrics"]
    for result in ranks:
        assert largest_difference(result["weights"], weights_of(group.worker)) < 1e-5
        for name in ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm"):
            assert result["metrics"][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5), name
        assert result["resume_difference"] == 0.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_on_two_ranks_equal_one(tiny_model_dir: Path, two_ranks: Path, strategy: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    group = make_group(_adapter_config(tiny_model_dir, strategy))
    batch = _unequal_batch(tiny_model_dir)
    reference = group.compute_log_prob(batch).batch["old_log_probs"]
    use_sgd(group.worker)
    group.update_actor(_two_rank_order(batch))
    group.start_rollout(1)
    engine = dict(group.worker.rollout.module.named_parameters())
    ranks = _results(two_ranks, f"lora_{strategy}")
    for result in ranks:
        assert largest_difference(result["weights"], weights_of(group.worker)) < 1e-5
        assert largest_difference(result["engine"], engine) < 1e-5
        assert result["resume_difference"] == 0.0
    log_probs = group.compute_log_prob(batch).batch["old_log_probs"]
    assert float((log_probs - reference).abs().max()) > 1e-3
    assert torch.allclose(torch.cat([result["log_probs"] for result in ranks]), log_probs, atol=1e-5)
    assert torch.allclose(torch.cat([result["reference"] for result in ranks]), reference, atol=1e-5)
    adapter = two_ranks / f"lora_{strategy}" / "lora_adapter"
    merged = two_ranks / f"lora_{strategy}" / "huggingface"
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), adapter)
    expected = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert largest_difference(adapted.merge_and_unload().state_dict(), expected) < 1e-5


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_token_budgets_on_two_ranks_equal_one(tiny_model_dir: Path, two_ranks: Path, mode: str) -> None:
    options = _options("fsdp2") | {"loss_agg_mode": mode}
    group = make_group(worker_config(tiny_model_dir, actor=options), "actor")
    use_sgd(group.worker)
    group.update_actor(_two_rank_order(_lengthwise_batch(tiny_model_dir)))
    ranks = _results(two_ranks, f"budget_{mode}")
    for weights, passes in ranks:
        assert largest_difference(weights, weights_of(group.worker)) < 1e-5
        assert passes == ranks[0][1] > 2


@pytest.mark.slow
def test_hybrid_sharding_on_four_ranks_equals_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    mp.spawn(_rank_main, args=(4, free_port("127.0.0.1"), str(tiny_model_dir), str(tmp_path)), nprocs=4)
    group = make_group(worker_config(tiny_model_dir, actor=_options("fsdp2")))
    use_sgd(group.worker)
    group.update_actor(_unequal_batch(tiny_model_dir)[[0, 1, 3, 4, 6, 7, 9, 10, 2, 5, 8, 11]])
    expected = weights_of(group.worker)
    for strategy, size in HYBRID:
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{strategy}_{size}_hf").state_dict()
        for result in _results(tmp_path, f"{strategy}_{size}", 4):
            assert largest_difference(result["weights"], expected) < 1e-5
            assert all(torch.equal(exported[name], weight) for name, weight in result["weights"].items())
            assert all(torch.equal(result["weights"][name], weight) for name, weight in result["engine"].items())
            assert result["resume_difference"] == 0.0


def test_co_located_ray_workers_equal_one_process(ray_session: None, tiny_model_dir: Path) -> None:
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

    config = worker_config(tiny_model_dir, actor=_options("fsdp2"))
    roles = {
        role: RayClassWithInitArgs(ActorRolloutRefWorker, config, role=role, device="cpu")
        for role in ("ref", "actor_rollout")
    }
    pool = RayResourcePool([2], use_gpu=False)
    parent = RayWorkerGroup(pool, create_colocated_worker_cls(roles))
    try:
        groups = parent.spawn(set(roles))
        local = make_group(config)
        for group in (*groups.values(), local):
            group.init_model()
        batch = _unequal_batch(tiny_model_dir)
        prompts = prompt_batch(tiny_model_dir)
        responses, log_probs, metrics = [], [], []
        for group, rows in ((groups["actor_rollout"], batch), (local, _two_rank_order(batch))):
            with rollout_session(group, 1):
                responses.append(group.generate_sequences(prompts).batch["responses"])
            log_probs.append(group.compute_log_prob(batch).batch["old_log_probs"])
            metrics.append(group.update_actor(rows).meta_info["metrics"])
        assert torch.equal(*responses)
        assert torch.allclose(*log_probs, atol=1e-5)
        reference = groups["ref"].compute_ref_log_prob(batch).batch["ref_log_prob"]
        assert torch.allclose(reference, log_probs[1], atol=1e-5)
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
            # The second mini-batch runs with weights that AdamW has moved: rounding counts for more.
            assert metrics[0][name] == pytest.approx(metrics[1][name], abs=1e-3), name
        assert groups["actor_rollout"].rollout_version() == [1, 1]
        assert all(report["perf/cpu_memory_used_gb"] > 0 for report in groups["actor_rollout"].memory_report())
    finally:
        parent.shutdown()
        pool.shutdown()
