# SPDX-License-Identifier: Apache-2.0
"""Rows that join vLLM while it generates sample what they sample together; ranks that share an engine stay in step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.helpers.streams import assert_equal_rows, named, stream
from tests.helpers.tiny import make_tiny_model
from tests.verl.workers.support import make_group, prompt_batch, worker_config
from verl.protocol import DataProto
from verl.single_controller.base.worker import free_port
from verl.workers.rollout.session import rollout_session

pytestmark = pytest.mark.vllm

MANY_ENDS = tuple(range(2, 40))
# Rows that the two ranks hand over in each call: unequal, and sometimes none.
PORTIONS = ((3, 0, 5, 0), (1, 4, 0, 3))


@pytest.mark.parametrize("sizes", [[16], [1, 5, 0, 7, 3]])
def test_joining_rows_sample_what_they_sample_together(
    make_policy: Callable[[str], Any], model_dirs: dict[str, Path], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_policy("tied")
    engine = group.worker.rollout
    monkeypatch.setattr(engine, "eos_token_ids", MANY_ENDS)
    prompts = prompt_batch(model_dirs["tied"], repeat=2)
    with rollout_session(group, group.rollout_version()[0] + 1):
        whole = engine.generate_sequences(prompts)
        ended, counts = stream(engine, named(prompts, 0.25), sizes)
        assert_equal_rows(ended, whole)
        assert max(counts) < 16 and sum(counts) == 16
        # What is left behind does not come back.
        assert len(engine.generate_some(prompts)) < 16
    with rollout_session(group, group.rollout_version()[0] + 1):
        assert_equal_rows(stream(engine, prompts, [16])[0], whole)


def _rank_main(rank: int, port: int, path: str, out: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    torch.set_num_threads(1)
    config = worker_config(Path(path), rollout={"name": "vllm", "tensor_model_parallel_size": 2})
    worker = ActorRolloutRefWorker(config, "actor_rollout", "cpu")
    worker.init_model()
    worker.rollout.eos_token_ids = MANY_ENDS
    worker.start_rollout(0)
    prompts = named(prompt_batch(Path(path), repeat=2), 0.25)
    mine = prompts[8 * rank : 8 * rank + 8]
    parts, start = [], 0
    for size in [*PORTIONS[rank], *[0] * 16]:
        parts.append(worker.generate_some(mine[start : start + size]))
        start += size
    torch.save(dict(DataProto.concat(parts).batch.items()), f"{out}_{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_share_an_engine(tmp_path: Path) -> None:
    # Two key/value heads, so that each rank has one.
    path = make_tiny_model(tmp_path / "hf", hidden_size=128, num_heads=4, num_kv_heads=2)
    out = tmp_path / "out"
    mp.start_processes(_rank_main, args=(free_port(), str(path), str(out)), nprocs=2, start_method="spawn")
    group = make_group(worker_config(path, rollout={"name": "vllm", "tensor_model_parallel_size": 1}))
    group.worker.rollout.eos_token_ids = MANY_ENDS
    with rollout_session(group, 0):
        whole = group.generate_sequences(prompt_batch(path, repeat=2))
    ended: dict[int, DataProto] = {}
    for rank in range(2):
        rows = DataProto.from_dict(torch.load(f"{out}_{rank}.pt"))
        assert sorted(rows.batch["row"].tolist()) == list(range(8 * rank, 8 * rank + 8))
        ended |= {row: rows[place : place + 1] for place, row in enumerate(rows.batch["row"].tolist())}
    assert_equal_rows(ended, whole)
