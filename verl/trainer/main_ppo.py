# SPDX-License-Identifier: Apache-2.0
"""RL training program: ``python -m verl.trainer.main_ppo key=value ...``.

Wires the parts together: config -> environments -> tokenizer, collector, validator -> worker groups -> trainer. A
recipe's own entry calls :func:`run_ppo` with its module added.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.cli import hydra_program
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sized

    from omegaconf import DictConfig
    from torch.utils.data import Dataset, Sampler

    from verl.trainer.config.schema import DataConfig, PPOConfig
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.recipes import Recipe
    from verl.trainer.ppo.worker_groups import WorkerGroupFactory

__all__ = [
    "TaskRunner",
    "build_trainer",
    "create_rl_dataset",
    "create_rl_sampler",
    "main",
    "read_config",
    "run_ppo",
]

logger = logging.getLogger(__name__)


def read_config(cfg: DictConfig, extra_recipe_modules: Sequence[str] = ()) -> tuple[PPOConfig, tuple[Recipe, ...]]:
    """Import the recipes, build the typed config and refuse what cannot work, before anything heavy is loaded.

    Raises:
        UserError: names the key and the way out.
    """
    from verl.trainer.config.schema import PPOConfig, build_config, ignored_keys, validate_ppo_config
    from verl.trainer.ppo.core_algos import get_adv_estimator
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
    warmup = config.trainer.critic_warmup
    if warmup > 1 and not get_adv_estimator(config.algorithm.adv_estimator).needs_critic:
        logger.warning(
            "trainer.critic_warmup=%d: there is no value model, and nothing is learnt before that step", warmup
        )
    hook_classes(recipes, config)
    return config, recipes


def with_worker_modules(config: PPOConfig, modules: Sequence[str]) -> PPOConfig:
    """The config with the recipes' modules among those that every worker process imports first.

    A policy loss that a recipe registers has to be in the workers' registry, not only in the driver's.
    """

    def merged(present: str | Sequence[str] | None) -> tuple[str, ...] | None:
        own = (present,) if isinstance(present, str) else tuple(present or ())
        return tuple(dict.fromkeys([*own, *modules])) or None

    policy, critic = config.actor_rollout_ref, config.critic
    policy = replace(policy, model=replace(policy.model, external_lib=merged(policy.model.external_lib)))
    critic = replace(critic, model=replace(critic.model, external_lib=merged(critic.model.external_lib)))
    return replace(config, actor_rollout_ref=policy, critic=critic)


def steps_per_epoch(data: DataConfig) -> int:
    """Training steps of one pass over the prompts: 1 without prompt files, else placeholder rows // batch size.

    Raises:
        UserError: a file is missing or no parquet, or there are fewer rows than ``data.train_batch_size``.
    """
    if data.train_files is None:
        return 1
    from verl.utils.dataset.parquet import count_rows

    rows = count_rows(data.train_files, "data.train_files")
    steps = rows // data.train_batch_size
    if steps == 0:
        raise UserError(
            f"data.train_files has {rows} rows, fewer than data.train_batch_size={data.train_batch_size}; "
            "set data.train_files=null (the environment defines the tasks) or a smaller batch"
        )
    return steps


def check_inputs(config: PPOConfig) -> None:
    """Look for the prompt files and the model folders, before anything is built or started.

    Raises:
        UserError: one of them is missing; names the key.
    """
    from verl.trainer.ppo.core_algos import get_adv_estimator
    from verl.utils.fs import copy_to_local

    steps_per_epoch(config.data)
    copy_to_local(config.actor_rollout_ref.model.path, "actor_rollout_ref.model.path")
    if get_adv_estimator(config.algorithm.adv_estimator).needs_critic:
        copy_to_local(config.critic.model.path, "critic.model.path")


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
    from agent_system.environments.ray_vector_env import default_num_workers

    slots = (config.data.train_batch_size * config.env.group_size, config.data.num_val_slots)
    wanted = config.env.num_workers
    return sum(default_num_workers(n) if wanted is None else min(wanted, n) for n in slots)


def run_ppo(cfg: DictConfig, extra_recipe_modules: Sequence[str] = ()) -> None:
    """Train as ``cfg`` says; ``extra_recipe_modules`` are loaded after ``algorithm.recipe_modules``.

    Raises:
        UserError: something the user can fix; everything that can be checked without a model is checked first.
    """
    config, recipes = read_config(cfg, extra_recipe_modules)
    check_inputs(config)

    from verl.trainer.ppo.ray_setup import join_cluster

    joined = join_cluster(config)
    try:
        _train(config, recipes)
    finally:
        if joined:
            import ray

            ray.shutdown()


def _train(config: PPOConfig, recipes: Sequence[Recipe]) -> None:
    """Build everything, train, and close everything, in the Ray that is up or in one of its own."""
    from agent_system.environments import make_envs
    from verl.trainer.ppo.ray_setup import choose_device, demand, start_ray
    from verl.trainer.ppo.worker_groups import RayWorkerGroups

    device = choose_device(config)
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


class TaskRunner:
    """The whole program as an object, as code written for verl starts it (directly, or through ``ray.remote``)."""

    def run(self, config: DictConfig) -> None:
        """Train as the composed config says, see :func:`run_ppo`."""
        run_ppo(config)


def create_rl_dataset(
    data_paths: str | Sequence[str], data_config: Any, tokenizer: Any, processor: Any = None
) -> Dataset[Any]:
    """The prompt data set that code written for verl builds; this program itself gets its tasks from environments."""
    from verl.utils.dataset import RLHFDataset

    dataset: Dataset[Any] = RLHFDataset(
        data_files=data_paths, tokenizer=tokenizer, processor=processor, config=data_config
    )
    return dataset


def create_rl_sampler(data_config: DataConfig | Mapping[str, Any], dataset: Sized) -> Sampler[int]:
    """Row order of such a data set: random from a generator seeded with ``data_config.seed``, or sequential.

    Args:
        data_config: the ``data`` section, or some of its keys.
    """
    import torch
    from torch.utils.data import RandomSampler, SequentialSampler

    from verl.trainer.config.schema import DataConfig, build_config

    config = data_config if isinstance(data_config, DataConfig) else build_config(DataConfig, data_config)
    if not config.shuffle:
        return SequentialSampler(dataset)
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(config.seed))


def _run(cfg: DictConfig) -> None:
    run_ppo(cfg)


main = hydra_program(_run, "verl.trainer.config", "ppo_trainer")

if __name__ == "__main__":
    main()
