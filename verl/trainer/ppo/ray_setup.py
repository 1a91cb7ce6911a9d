# SPDX-License-Identifier: Apache-2.0
"""Starting Ray for a run, and checking beforehand that what the run asks for is there."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from verl.trainer.config.loading import check_device
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


def join_cluster(config: PPOConfig) -> bool:
    """Connect to the Ray cluster that ``ray_init.address`` or ``RAY_ADDRESS`` names, unless Ray is up; True when this
    call did. Without an address nothing happens: :func:`start_ray` then starts a local Ray.

    Raises:
        UserError: no cluster answers there, or the config also says how large it should be.
    """
    import ray

    address = config.ray_init.address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized() or address in (None, "", "local"):
        return False
    kwargs = _ray_kwargs(config)
    for name in ("num_cpus", "num_gpus", "object_store_memory"):
        if name in kwargs:
            raise UserError(
                f"ray_init.{name}={kwargs[name]} is a size for a Ray that the run starts itself, and the one at "
                f"{address} is running; set ray_init.{name}=null"
            )
    try:
        ray.init(runtime_env=_runtime_env(config), **(kwargs | {"address": address}))
    except ConnectionError as error:
        raise UserError(
            f"no Ray cluster answers at {address} (ray_init.address, RAY_ADDRESS): {' '.join(str(error).split())}; "
            "start one there, or leave both unset to start Ray on this machine"
        ) from error
    return True


def choose_device(config: PPOConfig) -> Literal["cuda", "cpu"]:
    """The device of ``trainer.device``. With Ray up, its cluster decides what ``auto`` is, as the driver's machine need
    not have a GPU; otherwise this machine does.

    Raises:
        UserError: ``cuda`` on a machine without a CUDA device, where the run stays on this machine.
    """
    import ray

    wanted = config.trainer.device
    if wanted == "cpu" or not ray.is_initialized():
        return check_device(wanted)
    if wanted == "auto":
        return "cuda" if ray.cluster_resources().get("GPU", 0.0) >= config.trainer.world_size else "cpu"
    return "cuda"


def start_ray(config: PPOConfig, wanted: Demand) -> bool:
    """Start a local Ray, unless one is up; True when this call did.

    A local Ray without ``ray_init.num_cpus`` gets as many CPU slots as the run asks for, even where that is more than
    the cores: on two cores everything then runs, slowly.

    Raises:
        UserError: the run asks for more than there is; the message gives both numbers and the keys to change.
    """
    import ray

    if ray.is_initialized():
        _check_cluster(wanted, ray.cluster_resources())
        return False
    kwargs = _ray_kwargs(config)
    cores = os.cpu_count() or 1
    kwargs.setdefault("num_cpus", max(cores, math.ceil(wanted.cpus)))
    kwargs["address"] = "local"
    gpus = int(kwargs.get("num_gpus", _visible_gpus()))
    _check_local(config, wanted, int(kwargs["num_cpus"]), gpus)
    kwargs["num_gpus"] = gpus
    logger.info("starting a local Ray with %d CPU and %d GPU slots", kwargs["num_cpus"], gpus)
    ray.init(runtime_env=_runtime_env(config), include_dashboard=False, **kwargs)
    return True


def _ray_kwargs(config: PPOConfig) -> dict[str, Any]:
    return {name: value for name, value in config.ray_init.ray_kwargs().items() if name != "runtime_env"}


def _runtime_env(config: PPOConfig) -> dict[str, Any]:
    """The user's ``ray_init.runtime_env`` over the defaults."""
    given = dict(config.ray_init.runtime_env or {})
    return given | {"env_vars": get_ppo_ray_runtime_env()["env_vars"] | dict(given.get("env_vars", {}))}


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
