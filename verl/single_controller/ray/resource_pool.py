# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a worker group live: one placement group per node, one bundle per rank."""

from __future__ import annotations

import logging
import math
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from verl.single_controller.base import ResourcePool
from verl.utils.errors import UserError

__all__ = ["RayResourcePool", "merge_resource_pool", "sort_placement_group_by_node_ip"]

logger = logging.getLogger(__name__)

_CPU_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Idle OpenMP threads sleep: spinning ones would take the cores from the other ranks."""


class RayResourcePool(ResourcePool):
    """Processes on Ray nodes, e.g. `RayResourcePool([8, 8])` for two nodes of eight GPUs.

    Args:
        process_on_nodes: ranks per node.
        use_gpu: one GPU (and `max_colocate_count` CPUs) a rank; else CPUs only.
        name_prefix: appears in actor and placement group names.
        max_colocate_count: how many worker groups may share the pool; each gets an equal part of every rank's share.
        detached: the placement groups outlive the driver.
        accelerator_type: custom Ray resource that each rank's node must have.
        cpus_per_rank: CPUs of a rank on a CPU pool; fractions allowed.
        env_vars: environment of the workers. CPU pools add `OMP_NUM_THREADS` (the rank's whole CPUs, at least 1) and
            passive OpenMP waiting for the names that are not given.
        ready_timeout: seconds to wait for resources that exist but are taken.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        cpus_per_rank: float = 1.0,
        env_vars: Mapping[str, str] | None = None,
        ready_timeout: float = 60.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        if max_colocate_count < 1 or cpus_per_rank <= 0:
            raise ValueError("max_colocate_count must be at least 1 and cpus_per_rank above 0")
        self.use_gpu, self.detached, self.accelerator_type = use_gpu, detached, accelerator_type
        self.name_prefix = name_prefix or f"pool_{uuid.uuid4().hex[:6]}_"
        self.cpus_per_rank, self.ready_timeout = cpus_per_rank, ready_timeout
        defaults = {} if use_gpu else {"OMP_NUM_THREADS": str(max(1, int(cpus_per_rank))), **_CPU_ENV}
        self.env_vars: dict[str, str] = {**defaults, **(env_vars or {})}
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._placement_groups: list[PlacementGroup] | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one rank."""
        if not self.use_gpu:
            return {"CPU": self.cpus_per_rank}
        extra = {self.accelerator_type: 1e-4} if self.accelerator_type else {}
        return {"CPU": float(self.max_colocate_count), "GPU": 1.0, **extra}

    @property
    def actor_share(self) -> dict[str, float]:
        """`num_cpus` and `num_gpus` of one actor: a rank's resources divided by the groups that may share them."""
        return {
            "num_cpus": 1.0 if self.use_gpu else _share(self.cpus_per_rank, self.max_colocate_count),
            "num_gpus": _share(1.0, self.max_colocate_count) if self.use_gpu else 0.0,
        }

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """One placement group per node, ordered by node address so that ranks are stable; made on the first call.

        Raises:
            UserError: the cluster has not, or not within `ready_timeout`, what is asked for; names both.
        """
        if self._placement_groups is not None:
            return self._placement_groups
        self._check_total()
        groups = [
            placement_group(
                bundles=[self.bundle] * count,
                strategy=strategy,
                name=f"{name or self.name_prefix}verl_group_{index}",
                lifetime="detached" if self.detached else None,
            )
            for index, count in enumerate(self.store)
        ]
        deadline = time.monotonic() + self.ready_timeout
        for group in groups:
            if not group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
                message = self._shortage("these resources did not become free", self.ready_timeout)
                for made in groups:
                    remove_placement_group(made)
                raise UserError(message)
        self._placement_groups = sort_placement_group_by_node_ip(groups)
        return self._placement_groups

    def _check_total(self) -> None:
        total = ray.cluster_resources()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for count in self.store:
            need = {key: value * count for key, value in self.bundle.items()}
            if not any(all(node.get(key, 0.0) >= value for key, value in need.items()) for node in nodes):
                raise UserError(self._shortage("no node of the Ray cluster has that much"))
        for key, value in self.bundle.items():
            if value * self.world_size > total.get(key, 0.0):
                raise UserError(self._shortage("the Ray cluster has less"))

    def _shortage(self, problem: str, waited: float | None = None) -> str:
        needs = " + ".join(_resources({k: v * count for k, v in self.bundle.items()}) for count in self.store)
        keys = self.bundle.keys()
        total = _resources({k: ray.cluster_resources().get(k, 0.0) for k in keys})
        free = _resources({k: ray.available_resources().get(k, 0.0) for k in keys})
        after = "" if waited is None else f" within {waited:g} s"
        way_out = "trainer.n_gpus_per_node or trainer.nnodes" if self.use_gpu else "the number of processes"
        return (
            f"resource pool {self.name_prefix!r} requests {needs} (ranks per node: {self.store}), "
            f"but {problem}{after}: {total} in total, {free} available; "
            f"lower {way_out}, or give Ray more (ray_init.num_cpus, more nodes)"
        )

    def shutdown(self) -> None:
        """Give the resources back; actors that still live in the pool are killed by Ray."""
        for group in self._placement_groups or ():
            remove_placement_group(group)
        self._placement_groups = None


def _share(amount: float, parts: int) -> float:
    # Ray counts in units of 1e-4; rounding up would let the last group not fit.
    return math.floor(amount / parts * 1e4) / 1e4


def _resources(values: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{key}: {value:g}" for key, value in values.items()) + "}"


def sort_placement_group_by_node_ip(pgs: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Order by the address of the node of the first bundle, so that a restart gives each node the same ranks."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group: PlacementGroup) -> str:
        return str(addresses[placement_group_table(group)["bundles_to_node_id"][0]])

    return sorted(pgs, key=address)


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool over the placement groups of two of the same kind (AssertionError otherwise)."""
    for name in ("use_gpu", "max_colocate_count", "cpus_per_rank", "detached", "env_vars"):
        assert vars(rp1)[name] == vars(rp2)[name], f"pools with different {name} cannot be merged"
    merged = RayResourcePool(
        [*rp1.store, *rp2.store],
        rp1.use_gpu,
        f"{rp1.name_prefix}_{rp2.name_prefix}",
        rp1.max_colocate_count,
        rp1.detached,
        rp1.accelerator_type,
        cpus_per_rank=rp1.cpus_per_rank,
        env_vars=rp1.env_vars,
        ready_timeout=rp1.ready_timeout,
    )
    merged._placement_groups = [*rp1.get_placement_groups(), *rp2.get_placement_groups()]
    return merged
