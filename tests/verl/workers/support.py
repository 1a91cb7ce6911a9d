# SPDX-License-Identifier: Apache-2.0
"""Workers and batches shared by the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoTokenizer

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.config.model_sections import (
    CheckpointConfig,
    CriticModelConfig,
    CriticOptimConfig,
    ModelConfig,
    OptimConfig,
)
from verl.trainer.config.worker_sections import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    RefConfig,
    RolloutConfig,
)
from verl.utils.fsdp_utils import full_state_dict, quiet_no_shard
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

RESPONSE_LENGTH = 12
PROMPTS = (
    "open fridge 1",
    "go to cabinet 1, look around and examine the mug 1",
    "x",
    "take apple 1 from countertop 2. Nothing happens.",
    "You are in the middle of a room.",
    "look",
    "put a clean apple in the fridge, then go to drawer 2",
    "inventory",
)


def worker_config(path: Path, *, actor: dict[str, Any] | None = None, **sections: Any) -> ActorRolloutRefConfig:
    """Policy section for the tiny model; ``actor``, ``model``, ``rollout`` override single keys."""
    actor_config = ActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=8,
        entropy_coeff=0.0,
        optim=OptimConfig(lr=1e-3),
        checkpoint=CheckpointConfig(contents=("model", "optimizer", "extra", "hf_model")),
    )
    rollout = RolloutConfig(
        name="hf", response_length=RESPONSE_LENGTH, prompt_length=48, log_prob_micro_batch_size_per_gpu=4
    )
    model = ModelConfig(path=str(path), enable_gradient_checkpointing=False)
    return ActorRolloutRefConfig(
        model=replace(model, **sections.get("model", {})),
        actor=replace(actor_config, **(actor or {})),
        ref=RefConfig(log_prob_micro_batch_size_per_gpu=4),
        rollout=replace(rollout, **sections.get("rollout", {})),
    )


def critic_config(path: Path, *, model: dict[str, Any] | None = None, **options: Any) -> CriticConfig:
    """Value-model section for the tiny model; ``options`` override single keys, ``model`` those of its model."""
    model_config = CriticModelConfig(path=str(path), tokenizer_path=str(path), enable_gradient_checkpointing=False)
    config = CriticConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=8,
        forward_micro_batch_size_per_gpu=4,
        optim=CriticOptimConfig(lr=1e-3),
        model=replace(model_config, **(model or {})),
    )
    return replace(config, **options)


def make_critic(config: CriticConfig, device: str = "cpu") -> LocalWorkerGroup:
    """One in-process rank with its value model loaded, and a head that is not zero."""
    group = LocalWorkerGroup(ClassWithInitArgs(CriticWorker, config=config, device=device))
    group.init_model()
    fill_head(group.worker)
    return group


def fill_head(worker: CriticWorker) -> None:
    """Numbers for the value head: one of zeros sends no gradient to the layers below."""
    state = full_state_dict(worker.model)
    generator = torch.Generator().manual_seed(3)
    for name in ("score.weight", "score.bias"):
        state[name] = 0.3 * torch.randn(state[name].shape, generator=generator)
    options = StateDictOptions(full_state_dict=True)
    with quiet_no_shard():
        set_model_state_dict(worker.model, state, options=options)


def make_group(config: ActorRolloutRefConfig, role: str = "actor_rollout", device: str = "cpu") -> LocalWorkerGroup:
    """One in-process rank with its model loaded."""
    group = LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, config=config, role=role, device=device))
    group.init_model()
    return group


def prompt_batch(path: Path, *, repeat: int = 1, width: int = 48) -> DataProto:
    """Left-padded prompts ``(8 * repeat, width)`` with one seed a row."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in PROMPTS
    ] * repeat
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][-width:] for text in texts]
    ids = torch.full((len(rows), width), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = torch.tensor(row)
        mask[number, width - len(row) :] = 1
    seeds = torch.arange(len(rows), dtype=torch.int64) * 7919 + 11
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "sampling_seed": seeds})


def training_batch(rows: int, path: Path, *, seed: int = 0, temperature: float = 1.0) -> DataProto:
    """Rows with random responses of 1 to R tokens, advantages, returns, old log-probs near nothing in particular."""
    generator = torch.Generator().manual_seed(seed)
    prompts = prompt_batch(path, repeat=-(-rows // len(PROMPTS)))[:rows]
    prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    lengths = torch.randint(1, RESPONSE_LENGTH + 1, (rows,), generator=generator)
    mask = (torch.arange(RESPONSE_LENGTH) < lengths[:, None]).long()
    responses = torch.randint(3, 300, (rows, RESPONSE_LENGTH), generator=generator) * mask
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, RESPONSE_LENGTH) * mask
    old = -4.5 + 0.3 * torch.randn(rows, RESPONSE_LENGTH, generator=generator)
    values = torch.randn(rows, RESPONSE_LENGTH, generator=generator)
    return DataProto.from_dict(
        {
            "prompts": prompt_ids,
            "responses": responses,
            "input_ids": torch.cat([prompt_ids, responses], dim=1),
            "attention_mask": torch.cat([prompt_mask, mask], dim=1),
            "response_mask": mask,
            "advantages": advantages,
            "old_log_probs": old * mask,
            "ref_log_prob": (old - 0.1) * mask,
            "values": values * mask,
            "returns": (values + torch.randn(rows, RESPONSE_LENGTH, generator=generator)) * mask,
        },
        meta_info={"temperature": temperature},
    )


def use_sgd(worker: ActorRolloutRefWorker | CriticWorker, lr: float = 1.0) -> None:
    """Makes updates proportional to gradients: Adam's first step hides their size and amplifies rounding."""
    model = worker.memory.model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    trained = worker.critic if isinstance(worker, CriticWorker) else worker.actor
    worker.optimizer = worker.memory.optimizer = trained.optimizer = optimizer


def weights_of(worker: ActorRolloutRefWorker | CriticWorker) -> dict[str, Tensor]:
    """Copies of the trained model's unsharded weights, on the CPU."""
    return {name: weight.cpu().clone() for name, weight in full_state_dict(worker.memory.model).items()}


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest absolute difference over all tensors of two equal-keyed dicts."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
