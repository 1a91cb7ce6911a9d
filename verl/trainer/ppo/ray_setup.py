# SPDX-License-Identifier: Apache-2.0
"""Starting Ray for a run, and checking beforehand that what the run asks for is there."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.utils.errors import UserError

if TYPE_CHECKING:
    from verl.trainer.config.schema import PPOConfig

logger = logging.getLogger(__name__)

# Set in every actor unless the shell already sets them.
DEFAULT_ENV_VARS = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
}


@dataclass(frozen=True)
class Demand:
    """Ray resources that a run asks for: ``cpus`` and ``gpus`` over all nodes."""

    cpus: float
    gpus: int


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """Default ``runtime_env`` of the RL program."""
    return {"env_vars": {name: value for name, value in DEFAULT_ENV_VARS.items() if name not in os.environ}}


def demand(config: PPOConfig, device: str, num_env_workers: int) -> Demand:
    """One CPU per rank, and the environment actors; one GPU per rank on CUDA."""
    ranks = config.trainer.world_size
    resources = config.env.resources_per_worker
    gpus = (ranks if device == "cuda" else 0) + math.ceil(resources.num_gpus * num_env_workers)
    return Demand(cpus=ranks + resources.num_cpus * num_env_workers, gpus=gpus)


def start_ray(config: PPOConfig, wanted: Demand) -> bool:
    """Connect to Ray, or start a local one, unless it is up; True when this call did.

    A local Ray without ``ray_init.num_cpus`` gets as many CPU slots as the run asks for, even where that is more than
    the cores: on two cores everything then runs, slowly.

    Raises:
        UserError: the run asks for more than there is; the message gives both numbers and the keys to change.
    """
    import ray

    if ray.is_initialized():
        _check_cluster(wanted, ray.cluster_resources())
        return False
    kwargs = config.ray_init.ray_kwargs()
    defaults = get_ppo_ray_runtime_env()
    runtime_env = dict(kwargs.pop("runtime_env", {}))
    runtime_env["env_vars"] = defaults["env_vars"] | dict(runtime_env.get("env_vars", {}))
    if kwargs.get("address") is None and not os.environ.get("RAY_ADDRESS"):
        cores = os.cpu_count() or 1
        kwargs.setdefault("num_cpus", max(cores, math.ceil(wanted.cpus)))
        kwargs["address"] = "local"
        gpus = int(kwargs.get("num_gpus", _visible_gpus()))
        _check_local(config, wanted, int(kwargs["num_cpus"]), gpus)
        kwargs["num_gpus"] = gpus
        logger.info("starting a local Ray with %d CPU and %d GPU slots", kwargs["num_cpus"], gpus)
    ray.init(runtime_env=runtime_env, include_dashboard=False, **kwargs)
    try:
        _check_cluster(wanted, ray.cluster_resources())
    except UserError:
        ray.shutdown()
        raise
    return True


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_local(config: PPOConfig, wanted: Demand, cpus: int, gpus: int) -> None:
    if wanted.cpus > cpus:
        raise UserError(
            f"the run asks Ray for {wanted.cpus:g} CPUs (one per rank, env.resources_per_worker.num_cpus per "
            f"environment actor) and ray_init.num_cpus={cpus}; set it to {math.ceil(wanted.cpus)} or to null"
        )
    if wanted.gpus > gpus:
        trainer = config.trainer
        raise UserError(
            f"the run asks for {wanted.gpus} GPUs (trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node}) and this machine shows {gpus}; lower them, or set trainer.device=cpu"
        )


def _check_cluster(wanted: Demand, available: dict[str, float]) -> None:
    for name, amount in (("CPU", wanted.cpus), ("GPU", wanted.gpus)):
        there = available.get(name, 0.0)
        if amount > there:
            raise UserError(
                f"the run asks for {amount:g} {name}s and the Ray cluster has {there:g}; lower trainer.nnodes, "
                "trainer.n_gpus_per_node or env.num_workers, or connect to a larger cluster (ray_init.address)"
            )
