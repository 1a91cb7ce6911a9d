# SPDX-License-Identifier: Apache-2.0
"""RL training program: ``python -m verl.trainer.main_ppo key=value ...``.

Wires the parts together: config -> environments -> tokenizer, collector, validator -> worker groups -> trainer. A
recipe's own entry calls :func:`run_ppo` with its module added.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.cli import hydra_program
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.trainer.config.schema import DataConfig, PPOConfig
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.recipes import Recipe
    from verl.trainer.ppo.worker_groups import WorkerGroupFactory

__all__ = ["build_trainer", "main", "read_config", "run_ppo"]

logger = logging.getLogger(__name__)


def read_config(cfg: DictConfig, extra_recipe_modules: Sequence[str] = ()) -> tuple[PPOConfig, tuple[Recipe, ...]]:
    """Import the recipes, build the typed config and refuse what cannot work, before anything heavy is loaded.

    Raises:
        UserError: names the key and the way out.
    """
    from verl.trainer.config.schema import PPOConfig, build_config, ignored_keys, validate_ppo_config
    from verl.trainer.ppo.ray_trainer import check_algorithm
    from verl.trainer.ppo.recipes import extra_config_sections, hook_classes, load_recipes

    modules = [*(cfg.algorithm.recipe_modules or ()), *extra_recipe_modules]
    recipes = load_recipes(modules)
    config = build_config(PPOConfig, cfg, extra_sections=extra_config_sections(recipes))
    validate_ppo_config(config)
    unread = ignored_keys(config)
    if unread:
        logger.warning("set, but read by no part of this version: %s", ", ".join(unread))
    config = with_worker_modules(config, modules)
    check_algorithm(config)
    hook_classes(recipes, config)
    return config, recipes


def with_worker_modules(config: PPOConfig, modules: Sequence[str]) -> PPOConfig:
    """The config with the recipes' modules among those that every worker process imports first.

    A policy loss that a recipe registers has to be in the workers' registry, not only in the driver's.
    """
    model = config.actor_rollout_ref.model
    present = (model.external_lib,) if isinstance(model.external_lib, str) else tuple(model.external_lib or ())
    merged = tuple(dict.fromkeys([*present, *modules]))
    return replace(
        config, actor_rollout_ref=replace(config.actor_rollout_ref, model=replace(model, external_lib=merged or None))
    )


def steps_per_epoch(data: DataConfig) -> int:
    """Training steps of one pass over the prompts: 1 without prompt files, else placeholder rows // batch size.

    Raises:
        UserError: a file is missing or no parquet, or there are fewer rows than ``data.train_batch_size``.
    """
    if data.train_files is None:
        return 1
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
    rows = sum(_parquet_rows(path) for path in files)
    steps = rows // data.train_batch_size
    if steps == 0:
        raise UserError(
            f"data.train_files has {rows} rows, fewer than data.train_batch_size={data.train_batch_size}; "
            "set data.train_files=null (the environment defines the tasks) or a smaller batch"
        )
    return steps


def _parquet_rows(path: str) -> int:
    import pyarrow
    import pyarrow.parquet

    from verl.utils.fs import require_file

    file = require_file(path, "data.train_files")
    try:
        return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"data.train_files={path}: {file} is not a parquet file ({error})") from error


def build_trainer(
    config: PPOConfig,
    recipes: Sequence[Recipe],
    *,
    device: str,
    make_worker_groups: WorkerGroupFactory,
    train_envs: Any,
    val_envs: Any,
) -> RayPPOTrainer:
    """Tokenizer, collector, validator and hooks around a trainer whose workers are not started yet."""
    from agent_system.multi_turn_rollout import TrajectoryCollector
    from agent_system.multi_turn_rollout.validation import Validator
    from agent_system.reward_manager import EpisodeRewardManager
    from agent_system.trajectory import save_trajectories
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.recipes import build_hooks
    from verl.utils.tokenizer import hf_tokenizer

    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path, trust_remote_code=config.data.trust_remote_code)
    collector = TrajectoryCollector(config, tokenizer)
    return RayPPOTrainer(
        config,
        tokenizer,
        collector=collector,
        validator=Validator(config, collector),
        reward_fn=EpisodeRewardManager(tokenizer=tokenizer, num_examine=0, normalize_by_length=False),
        train_envs=train_envs,
        val_envs=val_envs,
        make_worker_groups=make_worker_groups,
        device=device,
        hooks=build_hooks(recipes, config),
        steps_per_epoch=steps_per_epoch(config.data),
        save_episodes=save_trajectories,
    )


def num_env_workers(config: PPOConfig) -> int:
    """Environment actors of training and validation together."""
    from agent_system.environments.vector_env import default_num_workers

    slots = (config.data.train_batch_size * config.env.group_size, config.data.num_val_slots)
    wanted = config.env.num_workers
    return sum(default_num_workers(n) if wanted is None else min(wanted, n) for n in slots)


def run_ppo(cfg: DictConfig, extra_recipe_modules: Sequence[str] = ()) -> None:
    """Train as ``cfg`` says; ``extra_recipe_modules`` are loaded after ``algorithm.recipe_modules``.

    Raises:
        UserError: something the user can fix; everything that can be checked without a model is checked first.
    """
    config, recipes = read_config(cfg, extra_recipe_modules)
    steps_per_epoch(config.data)

    from agent_system.environments import make_envs
    from verl.trainer.config.schema import check_device
    from verl.trainer.ppo.ray_setup import demand, start_ray
    from verl.trainer.ppo.worker_groups import RayWorkerGroups

    device = check_device(config.trainer.device)
    train_envs, val_envs = make_envs(config)
    worker_groups = RayWorkerGroups(config, device)
    started_ray = False
    try:
        trainer = build_trainer(
            config,
            recipes,
            device=device,
            make_worker_groups=worker_groups,
            train_envs=train_envs,
            val_envs=val_envs,
        )
        started_ray = start_ray(config, demand(config, device, num_env_workers(config)))
        logger.info(
            "training %s for %d steps; checkpoints and metrics go to %s",
            config.actor_rollout_ref.model.path, trainer.total_steps, Path(config.trainer.default_local_dir).absolute(),
        )  # fmt: skip
        trainer.init_workers()
        trainer.fit()
    finally:
        train_envs.close()
        val_envs.close()
        worker_groups.close()
        if started_ray:
            import ray

            ray.shutdown()


def _run(cfg: DictConfig) -> None:
    run_ppo(cfg)


main = hydra_program(_run, "verl.trainer.config", "ppo_trainer")

if __name__ == "__main__":
    main()
