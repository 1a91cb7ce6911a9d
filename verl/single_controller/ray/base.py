# SPDX-License-Identifier: Apache-2.0
"""Worker groups on Ray actors, and roles that share one actor.

Start of a group: the actors start, rank 0's chooses the torch.distributed address, the driver asks it for that address
and passes it to the others; only then are the workers built, on all ranks at once, so that a worker may join the
process group in its `__init__`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerGroup
from verl.single_controller.base.worker import free_port
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
)
from verl.utils.errors import UserError

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "merge_resource_pool",
    "sort_placement_group_by_node_ip",
]

logger = logging.getLogger(__name__)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class (plain, or wrapped by `ray.remote`), its arguments, and Ray options for its actors.

    Calling it builds the worker in this process, so it also serves `LocalWorkerGroup`.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_unwrap_ray_remote(cls), *args, **kwargs)
        self.roles: dict[str, type[Any]] = {}
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Custom Ray resources that each actor takes."""
        self._additional_resource = dict(additional_resource)

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Options of `ray.remote` for the actors; they win over those of the pool."""
        self._options.update(options)

    def options(self, env_vars: Mapping[str, str]) -> dict[str, Any]:
        """Options for one actor with these environment variables."""
        runtime_env = dict(self._options.get("runtime_env") or {})
        runtime_env["env_vars"] = {**env_vars, **runtime_env.get("env_vars", {})}
        extra = {"resources": self._additional_resource} if self._additional_resource else {}
        return {**extra, **self._options, "runtime_env": runtime_env}


def _unwrap_ray_remote(cls: Any) -> type[Any]:
    metadata = getattr(cls, "__ray_metadata__", None)
    unwrapped = cls if metadata is None else metadata.modified_class.__ray_actor_class__
    if not inspect.isclass(unwrapped):
        raise TypeError(f"a worker group needs a class, got {type(cls).__name__}")
    return unwrapped


def _actor_class(cls: type[Any]) -> Any:
    """Ray actor class of a worker class whose `__init__` runs when the driver says so."""

    class Actor(cls):
        def __init__(self) -> None:
            """The worker's own `__init__` needs the master address, which is not known yet."""

        def verl_choose_master(self) -> tuple[str, str]:
            return ray.util.get_node_ip_address().strip("[]"), str(free_port())

        def verl_build(self, args: Sequence[Any], kwargs: Mapping[str, Any], master: tuple[str, str]) -> None:
            os.environ.update(MASTER_ADDR=master[0], MASTER_PORT=master[1])
            visible = ray.get_gpu_ids()
            # Ray normally hides the other GPUs, so a rank's device is number 0; with this switch it shows them all.
            if visible and os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
                os.environ["LOCAL_RANK"] = str(visible[0])
            cls.__init__(self, *args, **kwargs)

    Actor.__name__ = Actor.__qualname__ = cls.__name__
    return ray.remote(Actor)


class RayWorkerGroup(WorkerGroup):
    """Ray actors, one a rank, called like one object.

    Args:
        resource_pool: where the ranks live; None attaches to running actors instead.
        ray_cls_with_init: worker class and arguments.
        bin_pack: a node's ranks must be on one node (STRICT_PACK), else preferably (PACK).
        name_prefix: first part of the actors' names; random when None.
        detached: the actors outlive the driver.
        worker_names, worker_handles: running actors to attach to, by name or handle.
        ray_wait_register_center_timeout: seconds for rank 0 to start and choose the master address.
        device_name: "cuda" or "cpu"; the pool decides what the ranks get.

    Raises:
        UserError: the resources do not exist or are taken.
        RuntimeError: rank 0 does not start in time, or a worker dies. An exception in a worker arrives as it is.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float = 300,
        device_name: str = "cuda",
    ) -> None:
        if ray_cls_with_init is None:
            raise ValueError("RayWorkerGroup needs ray_cls_with_init, the worker class and its arguments")
        if device_name not in ("cuda", "cpu"):
            raise NotImplementedError(f"device_name={device_name!r}: worker groups run on cuda or cpu")
        self.ray_cls_with_init = ray_cls_with_init
        self.resource_pool = resource_pool
        self.name_prefix = name_prefix or uuid.uuid4().hex[:6]
        self._detached, self._timeout = detached, ray_wait_register_center_timeout
        self._name = f"{self.name_prefix}{ray_cls_with_init.cls.__name__}"
        self._role_prefix = ""
        self._parent: RayWorkerGroup | None = None
        self._dead: str | None = None
        self._worker_names: list[str] = list(worker_names or ())
        self._workers: list[Any] = []
        self._master: tuple[str, str] = ("", "")
        if worker_names is not None or worker_handles is not None:
            self._workers = list(worker_handles or (ray.get_actor(name) for name in self._worker_names))
            self._world_size = len(self._workers)
        else:
            if resource_pool is None:
                raise ValueError("RayWorkerGroup needs a resource_pool, or worker_names or worker_handles to attach to")
            self._world_size = resource_pool.world_size
            self._start(resource_pool, "STRICT_PACK" if bin_pack else "PACK")
        self._bind_worker_methods(ray_cls_with_init.cls)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
    ) -> RayWorkerGroup:
        """A group over running actors, by name or by handle."""
        return cls(
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
        )

    # ---- start --------------------------------------------------------------------------------------------------

    def _start(self, pool: RayResourcePool, strategy: str) -> None:
        sharing = len(pool.groups)
        if sharing >= pool.max_colocate_count:
            raise UserError(
                f"resource pool {pool.name_prefix!r} already holds {sharing} worker group(s), its max_colocate_count; "
                "raise that, co-locate the roles, or shut a group down"
            )
        placement_groups = pool.get_placement_groups(strategy=strategy)
        pool.groups.add(self)
        slots = [(group, i, n) for group, n in zip(placement_groups, pool.store) for i in range(n)]
        actor_class = _actor_class(self.ray_cls_with_init.cls)
        try:
            for rank, (group, local_rank, local_size) in enumerate(slots):
                env = self._worker_env(pool, rank, local_rank, local_size)
                name = f"{self._name}_{placement_groups.index(group)}:{local_rank}"
                options = {
                    "name": name,
                    "lifetime": "detached" if self._detached else None,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(group, local_rank),
                    **pool.actor_share,
                    **self.ray_cls_with_init.options(env),
                }
                self._workers.append(actor_class.options(**options).remote())
                self._worker_names.append(name)
            self._master = self._rendezvous()
            init = self.ray_cls_with_init
            self._wait([w.verl_build.remote(init.args, init.kwargs, self._master) for w in self._workers], "__init__")
        except BaseException:
            self.shutdown()
            raise

    def _worker_env(self, pool: RayResourcePool, rank: int, local_rank: int, local_size: int) -> dict[str, str]:
        return {
            **pool.env_vars,
            "WORLD_SIZE": str(self._world_size),
            "RANK": str(rank),
            # Ray shows an actor only its own GPU, which is number 0 there.
            "LOCAL_RANK": "0" if pool.use_gpu else str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            "WG_PREFIX": self.name_prefix,
            "WG_BACKEND": "ray",
            "RAY_LOCAL_WORLD_SIZE": str(local_size),
            "RAY_LOCAL_RANK": str(local_rank),
        }

    def _rendezvous(self) -> tuple[str, str]:
        ref = self._workers[0].verl_choose_master.remote()
        try:
            return self._fetch(ref, 0, "its start", timeout=self._timeout)
        except GetTimeoutError as e:
            raise RuntimeError(
                f"rank 0 of worker group {self._name!r} did not start within {self._timeout:g} s "
                "(trainer.ray_wait_register_center_timeout): the machine is overloaded, or the actor cannot be placed"
            ) from e

    # ---- calls --------------------------------------------------------------------------------------------------

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on rank 0 without waiting; returns an object reference."""
        return self._call(0, method_name, args, kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every rank without waiting; returns object references in rank order.

        When all arguments are lists with one entry a rank, each rank gets its entry; otherwise all get the same.
        """
        arguments = self._rank_arguments(args, kwargs)
        return [self._call(rank, method_name, a, k) for rank, (a, k) in enumerate(arguments)]

    def _call(self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._dead is not None:
            raise RuntimeError(self._dead)
        return getattr(self._workers[rank], self._role_prefix + method_name).remote(*args, **kwargs)

    def _wait(self, outputs: list[Any], method_name: str) -> list[Any]:
        """Results in rank order. The first rank that fails ends the wait: the others may be stuck in a collective."""
        ranks = {ref: rank for rank, ref in enumerate(outputs)}
        results: list[Any] = [None] * len(outputs)
        waiting = list(outputs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            for ref in done:
                try:
                    results[ranks[ref]] = self._fetch(ref, ranks[ref], method_name)
                except Exception:
                    self._raise_death(waiting, ranks, method_name)
                    raise
        return results

    def _raise_death(self, waiting: list[Any], ranks: Mapping[Any, int], method_name: str) -> None:
        """A rank whose peer died fails in its collective and may be the first to report: look for the cause."""
        if self._dead is not None or not waiting:
            return
        for ref in ray.wait(waiting, num_returns=len(waiting), timeout=2.0)[0]:
            try:
                ray.get(ref)
            except RayActorError:
                self._fetch(ref, ranks[ref], method_name)
            except RayError as e:
                logger.warning("worker group %r, rank %d failed too in %s: %s", self._name, ranks[ref], method_name, e)

    def _fetch(self, ref: Any, rank: int, method_name: str, timeout: float | None = None) -> Any:
        try:
            return ray.get(ref, timeout=timeout)
        except RayTaskError as e:
            # The worker's own exception, with its type and message; Ray's carries the remote traceback.
            if isinstance(e.cause, Exception):
                raise e.cause from e
            raise
        except RayActorError as e:
            reason = " ".join(str(e).split())
            self._dead = (
                f"worker group {self._name!r}: rank {rank} of {self._world_size} died in {method_name}: {reason}"
            )
            raise RuntimeError(self._dead) from e

    # ---- roles and the rest -------------------------------------------------------------------------------------

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """One group per role of a co-located class, over the same actors, with the role's plain method names."""
        roles = self.ray_cls_with_init.roles
        groups = {}
        for role in prefix_set:
            if role not in roles:
                raise ValueError(f"no role {role!r} in worker group {self._name!r}; it has {sorted(roles)}")
            group = RayWorkerGroup(
                ray_cls_with_init=RayClassWithInitArgs(roles[role]),
                name_prefix=self.name_prefix,
                worker_names=self._worker_names,
                worker_handles=self._workers,
            )
            group._name, group._role_prefix, group._master = f"{self._name}.{role}", f"{role}_", self._master
            group._parent = self
            groups[role] = group
        return groups

    spawn_fused = spawn

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the roles' groups attributes of this one: `group.actor.update(...)`."""
        for role, group in self.spawn(prefix_set).items():
            setattr(self, role, group)

    def shutdown(self) -> None:
        """Kill the actors; the pool keeps its resources for the next group (`RayResourcePool.shutdown` frees them)."""
        self._dead = self._dead or f"worker group {self._name!r} was shut down"
        for worker in self._workers:
            ray.kill(worker)
        owner = self._parent or self
        if owner.resource_pool is not None:
            owner.resource_pool.groups.discard(owner)

    @property
    def worker_names(self) -> list[str]:
        """Names of the actors in rank order."""
        return self._worker_names

    @property
    def workers(self) -> list[Any]:
        """Handles of the actors in rank order."""
        return self._workers

    @property
    def master_address(self) -> str:
        """Address that rank 0 chose for torch.distributed."""
        return self._master[0]

    @property
    def master_port(self) -> str:
        """Port that rank 0 chose for torch.distributed."""
        return self._master[1]


def create_colocated_worker_raw_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> type[Worker]:
    """A worker class that builds one worker per role in the same process; methods are `<role>_<method>`."""
    specs = dict(class_dict)

    class WorkerDict(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.worker_dict = {role: spec() for role, spec in specs.items()}
            for worker in self.worker_dict.values():
                if isinstance(worker, Worker):
                    worker.fused_worker_dict = self.worker_dict

    for role, spec in specs.items():
        for name, method in inspect.getmembers(spec.cls, inspect.isfunction):
            if not name.startswith("_"):
                full_name = f"{role}_{name}"
                assert not hasattr(WorkerDict, full_name), f"two co-located roles give the method {full_name!r}"
                setattr(WorkerDict, full_name, _forward(role, name, method))
    return WorkerDict


def _forward(role: str, name: str, method: Any) -> Any:
    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    return forward


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """All roles in one actor per rank; `RayWorkerGroup(...).spawn(roles)` gives one group per role."""
    colocated = RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))
    colocated.roles = {role: spec.cls for role, spec in class_dict.items()}
    return colocated


create_colocated_worker_cls_fused = create_colocated_worker_cls
