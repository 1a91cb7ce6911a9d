# SPDX-License-Identifier: Apache-2.0
"""Small real runs on a generated shop: their policy and their settings."""

from __future__ import annotations

from pathlib import Path

from agent_system.environments import make_envs
from examples.quickstart.tiny_policy import make_policy
from tests.agent_system.webshop_manager.conftest import WebshopConfigMaker

__all__ = ["make_shop_policy", "shop_overrides"]


def make_shop_policy(folder: Path, make_config: WebshopConfigMaker) -> Path:
    """An untrained policy whose tokenizer knows the shop's pages."""
    train, _ = make_envs(make_config(prompt_style="compact"))
    texts = []
    for task in train.tasks[:20]:
        texts += train.reset({"tasks": [task]})[0]["text"]
        texts += train.step([f"<think>a</think><action>search[{task['task_type']}]</action>"])[0]["text"]
    make_policy(folder, texts, vocab_size=600, num_phrases=100, hidden_size=64, num_layers=2, mlp_size=128)
    return folder


def shop_overrides(shop: Path, policy: Path, out: Path) -> list[str]:
    """Two steps of two groups of two episodes, of at most three turns of eight tokens."""
    return [
        f"actor_rollout_ref.model.path={policy}", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_invalid_action_penalty=True", "algorithm.adv_estimator=grpo",
        "data.train_batch_size=2", "data.val_batch_size=2", "data.max_prompt_length=512", "data.max_response_length=8",
        "env.env_name=Webshop", "env.max_steps=3", "env.rollout.n=2", "env.num_workers=0",
        f"env.webshop.data_dir={shop}", "env.webshop.prompt_style=compact", "env.webshop.val_goals=2",
        "trainer.n_gpus_per_node=1", "trainer.device=cpu", "trainer.logger=[]", "trainer.val_before_train=False",
        "trainer.total_epochs=2", "trainer.test_freq=2", f"trainer.default_local_dir={out}",
    ]  # fmt: skip
