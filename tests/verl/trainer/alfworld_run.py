# SPDX-License-Identifier: Apache-2.0
"""Small real runs on generated ALFWorld games: their settings, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ACTOR = "actor_rollout_ref.actor"


def alfworld_overrides(games: Path, model: Path, out: Path) -> list[str]:
    """Two steps of three groups of four episodes, of at most six turns of four tokens."""
    return [
        f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", f"{ACTOR}.strategy=fsdp2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        f"{ACTOR}.ppo_mini_batch_size=32", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32", f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.entropy_coeff=0", f"{ACTOR}.checkpoint.contents=[model,optimizer,extra,hf_model]",
        "algorithm.recipe_modules=[recipe.gigpo,recipe.hgpo,tests.helpers.coded_alfworld]",
        "env.env_name=coded_alfworld", f"env.alfworld.data_dir={games}", "env.alfworld.prompt_style=compact",
        "env.max_steps=6", "env.rollout.n=4", "env.num_workers=0", "data.train_batch_size=3", "data.val_batch_size=2",
        "data.max_prompt_length=256", "data.max_response_length=4", "data.truncation=left",
        "trainer.n_gpus_per_node=1", "trainer.device=cpu", "trainer.logger=[]", "trainer.val_before_train=False",
        "trainer.total_epochs=2", "trainer.save_freq=2", f"trainer.default_local_dir={out}",
    ]  # fmt: skip


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def exported_weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    """The policy as the checkpoint of a step exports it."""
    return model_weights(out / f"global_step_{step}" / "actor" / "huggingface")


def changed_by(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> float:
    """Largest change of a weight."""
    return max((after[name].float() - weight.float()).abs().max().item() for name, weight in before.items())
