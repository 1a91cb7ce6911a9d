# SPDX-License-Identifier: Apache-2.0
"""Two ranks that share one engine answer as one rank does, each its own rows, together or in portions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from tests.helpers.streams import assert_equal_rows, named
from tests.helpers.tiny import make_tiny_model
from tests.verl.workers.support import make_group, prompt_batch, training_batch, worker_config
from verl.protocol import DataProto
from verl.single_controller.base.worker import free_port

pytestmark = pytest.mark.vllm

MANY_ENDS = tuple(range(2, 40))
# Rows that the two ranks hand over in each call: unequal, and sometimes none.
PORTIONS = ((3, 0, 5, 0), (1, 4, 0, 3))


def _answers(worker: Any, path: Path, rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """This rank's answers before and after an update, every row together."""
    prompts, rows = prompt_batch(path, repeat=2), training_batch(8, path)
    answers = []
    for version in range(2):
        worker.start_rollout(version)
        answers.append(dict(worker.generate_sequences(prompts.chunk(ranks)[rank]).batch.items()))
        worker.end_rollout()
        worker.update_actor(rows.chunk(ranks)[rank])
    return answers


def _streamed(worker: Any, path: Path, rank: int) -> dict[str, Tensor]:
    """This rank's answers to rows that join while others generate; ends are so many that rows end at every length."""
    worker.rollout.eos_token_ids = MANY_ENDS
    worker.start_rollout(2)
    mine = named(prompt_batch(path, repeat=2), 0.25)[8 * rank : 8 * rank + 8]
    parts, start = [], 0
    for size in [*PORTIONS[rank], *[0] * 16]:
        parts.append(worker.generate_some(mine[start : start + size]))
        start += size
    worker.end_rollout()
    return dict(DataProto.concat(parts).batch.items())


def _rank_main(rank: int, port: int, path: str, out: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    torch.set_num_threads(1)
    config = worker_config(Path(path), rollout={"name": "vllm", "tensor_model_parallel_size": 2})
    worker = ActorRolloutRefWorker(config, "actor_rollout", "cpu")
    worker.init_model()
    torch.save((_answers(worker, Path(path), rank, 2), _streamed(worker, Path(path), rank)), f"{out}_{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_share_an_engine(tmp_path: Path) -> None:
    # Two key/value heads, so that each rank has one.
    path = make_tiny_model(tmp_path / "hf", hidden_size=128, num_heads=4, num_kv_heads=2)
    out = tmp_path / "out"
    mp.start_processes(_rank_main, args=(free_port(), str(path), str(out)), nprocs=2, start_method="spawn")
    answers, streams = zip(*(torch.load(f"{out}_{rank}.pt") for rank in range(2)))
    group = make_group(worker_config(path, rollout={"name": "vllm", "tensor_model_parallel_size": 1}))
    one = _answers(group, path, 0, 1)
    for version in range(2):
        both = {name: torch.cat([half[version][name] for half in answers]) for name in one[version]}
        for name in ("responses", "attention_mask", "position_ids"):
            assert torch.equal(both[name], one[version][name]), (version, name)
        assert torch.allclose(both["rollout_log_probs"], one[version]["rollout_log_probs"], atol=1e-4)
    assert not torch.equal(one[0]["responses"], one[1]["responses"])

    group.worker.rollout.eos_token_ids = MANY_ENDS
    group.start_rollout(2)
    whole = group.generate_sequences(prompt_batch(path, repeat=2))
    ended: dict[int, DataProto] = {}
    for rank, columns in enumerate(streams):
        rows = DataProto.from_dict(columns)
        assert sorted(rows.batch["row"].tolist()) == list(range(8 * rank, 8 * rank + 8))
        ended |= {row: rows[place : place + 1] for place, row in enumerate(rows.batch["row"].tolist())}
    assert_equal_rows(ended, whole)
