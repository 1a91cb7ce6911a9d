# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks against one: the same log-probs, updates, responses, exports and restored runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.verl.workers.support import (
    largest_difference,
    make_group,
    prompt_batch,
    training_batch,
    use_sgd,
    weights_of,
    worker_config,
)
from verl.protocol import DataProto
from verl.single_controller.base.worker import free_port
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout.session import rollout_session

STRATEGIES = ("fsdp", "fsdp2")
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


def _rank_main(rank: int, port: int, model: str, out: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    path, folder = Path(model), Path(out)
    for strategy in STRATEGIES:
        result: dict[str, Any] = {}
        worker = ActorRolloutRefWorker(worker_config(path, actor=_options(strategy)), "actor_rollout", "cpu")
        worker.init_model()
        batch = _unequal_batch(path).chunk(2)[rank]
        result["log_probs"] = worker.compute_log_prob(batch).batch["old_log_probs"]
        worker.start_rollout(0)
        result["responses"] = worker.generate_sequences(prompt_batch(path).chunk(2)[rank]).batch["responses"]
        adam, schedule = worker.optimizer, worker.actor
        use_sgd(worker)
        result["metrics"] = worker.update_actor(batch).meta_info["metrics"]
        result["weights"] = weights_of(worker)
        worker.start_rollout(1)
        result["engine"] = {name: w.clone() for name, w in worker.rollout.module.named_parameters()}
        worker.export_hf(folder / f"{strategy}_hf")

        worker.optimizer = schedule.optimizer = adam
        worker.update_actor(batch)
        worker.save_checkpoint(folder / f"{strategy}_checkpoint", 1)
        worker.update_actor(batch)
        straight = weights_of(worker)
        worker.load_checkpoint(folder / f"{strategy}_checkpoint")
        worker.update_actor(batch)
        result["resume_difference"] = largest_difference(weights_of(worker), straight)
        # A gradient that is not finite on one rank stops the step on both.
        before = weights_of(worker)
        if rank == 1:
            batch.batch["advantages"][:, 0] = torch.inf
        result["skipped"] = worker.update_actor(batch).meta_info["metrics"]["actor/skipped_steps"]
        result["skip_difference"] = largest_difference(weights_of(worker), before)
        torch.save(result, folder / f"{strategy}_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(_rank_main, args=(free_port("127.0.0.1"), str(tiny_model_dir), str(folder)), nprocs=2)
    return folder


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
