# SPDX-License-Identifier: Apache-2.0
"""The whole program on Ray: two ranks of co-located actor and reference, from the entry's `run_ppo`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy_env import register_toy
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import run_ppo

ray = pytest.importorskip("ray")


def overrides(model: Path, out: Path, ranks: int) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "actor_rollout_ref.actor.ppo_mini_batch_size=1024",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8", "actor_rollout_ref.actor.use_kl_loss=True",
        "algorithm.adv_estimator=grpo", "env.env_name=toy", "env.rollout.n=3", "env.max_steps=2",
        "data.train_batch_size=4", "data.val_batch_size=3", "data.max_prompt_length=128", "data.max_response_length=4",
        "data.truncation=left", f"trainer.n_gpus_per_node={ranks}", "trainer.device=cpu", "trainer.logger=[]",
        "trainer.total_epochs=2", "trainer.save_freq=2", "trainer.test_freq=2", f"trainer.default_local_dir={out}",
        "trainer.val_before_train=False",
    ]  # fmt: skip


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_on_ray_equal_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    register_toy()
    was_up = ray.is_initialized()
    for ranks in (1, 2):
        run_ppo(load_config("ppo_trainer", overrides(tiny_model_dir, tmp_path / str(ranks), ranks)))
        assert ray.is_initialized() == was_up
    one, two = lines(tmp_path / "1"), lines(tmp_path / "2")
    assert [line["step"] for line in two] == [1, 2]
    assert all(math.isfinite(value) for line in two for value in line.values())
    for name in ("episode/reward/mean", "response_length/mean", "critic/score/mean", "rollout/num_rows"):
        assert one[0][name] == two[0][name], name
    for name in ("actor/pg_loss", "actor/entropy_loss", "actor/grad_norm", "actor/kl_loss"):
        assert one[0][name] == pytest.approx(two[0][name], abs=1e-4), name
    state = json.loads((tmp_path / "2" / "global_step_2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and state["world_size"] == 2
    # A further run resumes at the end and has nothing left to do.
    run_ppo(load_config("ppo_trainer", overrides(tiny_model_dir, tmp_path / "2", 2)))
    assert len(lines(tmp_path / "2")) == 2
