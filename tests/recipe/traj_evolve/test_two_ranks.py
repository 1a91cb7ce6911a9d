# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks score and learn like one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from agent_system.trajectory import Trajectory
from recipe.traj_evolve.discriminator_worker import DiscriminatorWorker
from recipe.traj_evolve.options import TrajEvolveConfig
from tests.agent_system.step_discriminator.discriminator_data import learnable_episodes
from tests.recipe.traj_evolve.support import same
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.worker import free_port
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.fsdp_utils import full_state_dict

STRATEGIES = ("fsdp", "fsdp2")


def _options(folder: str) -> TrajEvolveConfig:
    return TrajEvolveConfig(
        discriminator_model_path=folder,
        discriminator_lr=1e-3,
        score_batch_size=2,
        update_batch_size=16,
        micro_batch_size_per_gpu=3,
    )


def _column(trajectories: list[Trajectory]) -> DataProto:
    column = np.empty(len(trajectories), dtype=object)
    column[:] = trajectories
    return DataProto.from_dict(tensors={}, non_tensors={"trajectory": column})


def _weights(worker: DiscriminatorWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in full_state_dict(worker.model).items()}


def _results(worker: Any, score: Any, folder: Path) -> dict[str, Any]:
    """Scores, an update, a checkpoint, a second update, and the same second update after going back."""
    trajectories, labels = learnable_episodes(4)
    result: dict[str, Any] = {"credit": score(trajectories), "stats": worker.scorer.stats}
    result["metrics"] = worker.update(trajectories, labels, (0, 0))
    result["weights"] = _weights(worker)
    worker.save_checkpoint(str(folder), 1)
    worker.update(trajectories, labels, (0, 1))
    twice = _weights(worker)
    worker.load_checkpoint(str(folder))
    worker.update(trajectories, labels, (0, 1))
    result["resumes"] = same(_weights(worker), twice)
    return result


def _rank_main(rank: int, port: int, model: str, out: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    for strategy in STRATEGIES:
        worker = DiscriminatorWorker(_options(model), "cpu", strategy)
        worker.init_model()

        def score(trajectories: list[Trajectory], worker: DiscriminatorWorker = worker) -> list[np.ndarray]:
            # Unequal shares: the ranks run different numbers of forward passes.
            share = trajectories[:5] if rank == 0 else trajectories[5:]
            return list(worker.score(_column(share)).non_tensor_batch["credit"])

        torch.save(_results(worker, score, Path(out) / strategy), Path(out) / f"{strategy}_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(discriminator_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(_rank_main, args=(free_port("127.0.0.1"), str(discriminator_dir), str(folder)), nprocs=2)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_equal_one(discriminator_dir: Path, two_ranks: Path, tmp_path: Path, strategy: str) -> None:
    ranks = [torch.load(two_ranks / f"{strategy}_{rank}.pt", weights_only=False) for rank in range(2)]
    group = LocalWorkerGroup(
        ClassWithInitArgs(DiscriminatorWorker, _options(str(discriminator_dir)), device="cpu", strategy=strategy)
    )
    group.init_model()

    def score(trajectories: list[Trajectory]) -> list[np.ndarray]:
        return list(group.score(_column(trajectories)).non_tensor_batch["credit"])

    one = _results(group.worker, score, tmp_path)
    credits = [credit for rank in ranks for credit in rank["credit"]]
    assert len(credits) == len(one["credit"]) == 8
    for left, right in zip(credits, one["credit"]):
        np.testing.assert_allclose(left, right, atol=1e-5)
    spread = np.concatenate(credits)
    assert spread.std() > 0.01 and one["resumes"]
    for rank in ranks:
        assert rank["resumes"]
        assert rank["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
        # Adam's first steps turn the rounding of tiny gradients into steps of the learning rate.
        difference = max(float((rank["weights"][name] - weight).abs().max()) for name, weight in one["weights"].items())
        assert difference < 1e-4, difference
    assert one["metrics"]["discriminator_rows"] > 16
