# SPDX-License-Identifier: Apache-2.0
"""GRPO on the TOY game with a tiny random model, in this process: everything is real but the size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agent_system.environments.vector_env import LocalVectorEnv
from tests.helpers.toy_env import ToyEnv, ToyManager
from verl.trainer.config.schema import PPOConfig, build_config, load_config
from verl.trainer.main_ppo import build_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.recipes import Recipe
from verl.trainer.ppo.worker_groups import local_worker_groups

RED = ({"name": "toy-red", "task_type": "toy"},)
COMMANDS = ("open the red door", "take the red key", "open the blue door", "go back")


def coded_projection(texts: list[str]) -> tuple[list[str], list[int]]:
    """Any text is a command: the sum of its characters chooses one. An untrained policy then acts at random."""
    return [COMMANDS[sum(map(ord, text)) % len(COMMANDS)] for text in texts], [1] * len(texts)


def toy_envs(config: PPOConfig, *, train: bool, tasks: Sequence[dict[str, Any]]) -> ToyManager:
    slots = config.data.train_batch_size * config.env.group_size if train else config.data.num_val_slots
    return ToyManager(
        LocalVectorEnv(ToyEnv, slots), coded_projection, config, env_name="toy", tasks=tasks,
        seed=config.env.seed, split="toy", panel_hash="toy",
    )  # fmt: skip


def toy_overrides(model: Path, folder: Path) -> list[str]:
    """A run that takes a second: 4 groups of 8 episodes a step, one token a turn."""
    return [
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.optim.lr=3e-3", "actor_rollout_ref.actor.entropy_coeff=0.0",
        "algorithm.adv_estimator=grpo", "data.train_batch_size=4", "env.rollout.n=8", "data.val_batch_size=4",
        "data.max_prompt_length=128", "data.max_response_length=1", "env.max_steps=4", "env.history_length=0",
        "trainer.n_gpus_per_node=1", "trainer.device=cpu", "trainer.logger=[]", "trainer.val_before_train=False",
        f"trainer.default_local_dir={folder}",
    ]  # fmt: skip


def toy_config(model: Path, folder: Path, *overrides: str) -> PPOConfig:
    return build_config(PPOConfig, load_config("ppo_trainer", [*toy_overrides(model, folder), *overrides]))


def toy_trainer(
    config: PPOConfig,
    *,
    tasks: Sequence[dict[str, Any]] = RED,
    ranks: Any = local_worker_groups,
    recipes: Sequence[Recipe] = (),
    device: str = "cpu",
) -> RayPPOTrainer:
    trainer = build_trainer(
        config,
        recipes,
        device=device,
        make_worker_groups=ranks,
        train_envs=toy_envs(config, train=True, tasks=tasks),
        val_envs=toy_envs(config, train=False, tasks=tasks),
    )
    return trainer


def run_toy(config: PPOConfig, **kwargs: Any) -> tuple[RayPPOTrainer, list[dict[str, Any]]]:
    """Train; returns the trainer and the logged lines of its folder."""
    trainer = toy_trainer(config, **kwargs)
    trainer.init_workers()
    trainer.fit()
    lines = (trainer.store.root / "metrics.jsonl").read_text().splitlines()
    return trainer, [json.loads(line) for line in lines]


def weights(trainer: RayPPOTrainer, folder: Path) -> dict[str, torch.Tensor]:
    """The policy's weights, through its Hugging Face export."""
    from safetensors.torch import load_file

    trainer.actor_rollout_wg.export_hf(str(folder))
    return load_file(folder / "model.safetensors")
