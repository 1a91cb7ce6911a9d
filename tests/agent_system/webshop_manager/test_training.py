# SPDX-License-Identifier: Apache-2.0
"""GRPO on a generated shop with a tiny policy, in this process: everything is real but the size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_system.environments import make_envs
from agent_system.environments.env_package.webshop.manager import SCORE_KEY
from tests.agent_system.webshop_manager.conftest import WebshopConfigMaker
from tests.agent_system.webshop_manager.shop_run import make_shop_policy, shop_overrides
from verl.trainer.config.schema import PPOConfig, build_config, load_config
from verl.trainer.main_ppo import build_trainer
from verl.trainer.ppo.worker_groups import local_worker_groups


@pytest.fixture(scope="module")
def policy(make_config: WebshopConfigMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy whose tokenizer knows the shop's pages."""
    return make_shop_policy(tmp_path_factory.mktemp("policy") / "hf", make_config)


def test_two_steps_of_grpo(policy: Path, shop_dir: Path, tmp_path: Path) -> None:
    config = build_config(PPOConfig, load_config("ppo_trainer", shop_overrides(shop_dir, policy, tmp_path)))
    train_envs, val_envs = make_envs(config)
    trainer = build_trainer(
        config, (), device="cpu", make_worker_groups=local_worker_groups, train_envs=train_envs, val_envs=val_envs
    )
    trainer.init_workers()
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "episode/success_rate" in line]
    assert len(steps) == 2
    for line in steps:
        assert line[f"episode/{SCORE_KEY}"] >= line["episode/success_rate"] >= 0.0
        assert line["episode/count"] == 4 and line["actor/grad_norm"] >= 0.0
    record = json.loads((tmp_path / "validation" / "step_2.json").read_text())
    assert record["environment"]["products"] == 80 and record["environment"]["nouns"]
    assert record["num_tasks"] == 2 and SCORE_KEY in record["success_keys"]
