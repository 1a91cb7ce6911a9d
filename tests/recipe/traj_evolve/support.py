# SPDX-License-Identifier: Apache-2.0
"""TrajEvolve runs on the TOY game in this process: real model, real discriminator, real replay, a second a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agent_system.step_discriminator.discriminator import DiscriminatorConfig
from agent_system.step_discriminator.trajectory_analyzer import EnvAdapter, register_adapter
from tests.helpers.tiny import make_tiny_model
from tests.helpers.toy_env import ToyEnv
from tests.verl.trainer.toy_run import toy_overrides, toy_trainer
from verl.trainer.config.schema import PPOConfig, load_config
from verl.trainer.main_ppo import read_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, StepState
from verl.trainer.ppo.recipes import Recipe
from verl.utils.fsdp_utils import full_state_dict
from verl.utils.tokenizer import hf_tokenizer

MODULE = "recipe.traj_evolve"


class ToyGame(ToyEnv):
    """TOY with what replay needs."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        super().__init__()
        self.task = dict(task)

    @property
    def state_key(self) -> str:
        return f"{self.colour}:{self.state}"

    def reset(self, task: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return super().reset(self.task)

    def snapshot(self) -> str:
        return self.state

    def restore(self, snapshot: str) -> None:
        self.state = snapshot


def toy_reveals(action: str, observation: str) -> str | None:
    """Opening a door shows what is behind it."""
    return action if action.startswith("open") and not observation.startswith("Nothing") else None


def register_toy_adapter() -> None:
    """Make TOY's trajectories replayable."""
    register_adapter("toy", lambda data_dir: EnvAdapter(make_game=ToyGame, reveals=toy_reveals))


def make_discriminator(path: Path, **size: Any) -> Path:
    """An untrained discriminator's folder, as stage 2 writes it; its answers are arbitrary but spread."""
    make_tiny_model(path, seed=5, init_std=0.3, **size)
    DiscriminatorConfig(max_length=1024).save(path, hf_tokenizer(str(path)))
    return path


def evolve_config(model: Path, folder: Path, *overrides: str) -> tuple[PPOConfig, tuple[Recipe, ...]]:
    """The recipe's own config with the TOY overrides, through the entry's own reading and checks."""
    register_toy_adapter()
    given = [*toy_overrides(model, folder), "env.env_name=toy", *overrides]
    return read_config(load_config("traj_evolve_trainer", given, "recipe.traj_evolve.config"), (MODULE,))


def evolve_trainer(model: Path, folder: Path, *overrides: str, **kwargs: Any) -> RayPPOTrainer:
    config, recipes = evolve_config(model, folder, *overrides)
    trainer = toy_trainer(config, recipes=recipes, **kwargs)
    trainer.init_workers()
    return trainer


def run_evolve(model: Path, folder: Path, *overrides: str, **kwargs: Any) -> tuple[RayPPOTrainer, list[dict[str, Any]]]:
    """Train; returns the trainer and the logged lines of its folder."""
    trainer = evolve_trainer(model, folder, *overrides, **kwargs)
    trainer.fit()
    return trainer, logged(folder)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_clocks(lines: Sequence[Mapping[str, Any]], *prefixes: str) -> list[dict[str, Any]]:
    """Logged lines without wall times, machine state and what else starts with `prefixes`."""
    dropped = ("timing", "perf", *prefixes)
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def policy_weights(trainer: RayPPOTrainer) -> dict[str, torch.Tensor]:
    return _copies(trainer.worker_groups["actor_rollout"].worker.actor_model)  # type: ignore[attr-defined]


def discriminator_weights(trainer: RayPPOTrainer) -> dict[str, torch.Tensor]:
    return _copies(trainer.worker_groups["discriminator"].worker.model)  # type: ignore[attr-defined]


def _copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in full_state_dict(model).items()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Bit equality of two state dicts."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def run_phases(trainer: RayPPOTrainer, until: str = "update_actor") -> StepState:
    """Step 1 up to and without the phase `until`; its batch can then be looked at."""
    state = StepState(1)
    for phase in trainer.phases:
        if phase.name == until:
            return state
        if phase.when(1):
            phase.run(state)
    raise ValueError(f"no phase {until}")
