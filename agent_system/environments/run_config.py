# SPDX-License-Identifier: Apache-2.0
"""The part of a run's configuration that building any environment's manager reads."""

from __future__ import annotations

from typing import Protocol

from agent_system.environments.vector_env import TextEnvFactory, VectorEnv, WorkerResources, make_vector_env

__all__ = ["DataSection", "EnvSection", "make_slots"]


class _Resources(Protocol):
    @property
    def num_cpus(self) -> float: ...
    @property
    def num_gpus(self) -> float: ...


class _GroupSection(Protocol):
    @property
    def n(self) -> int: ...


class EnvSection(Protocol):
    """`env`, without the section of the environment itself."""

    @property
    def seed(self) -> int: ...
    @property
    def history_length(self) -> int: ...
    @property
    def num_workers(self) -> int | None: ...
    @property
    def worker_timeout(self) -> float: ...
    @property
    def resources_per_worker(self) -> _Resources: ...
    @property
    def rollout(self) -> _GroupSection: ...


class DataSection(Protocol):
    """`data`."""

    @property
    def train_batch_size(self) -> int: ...
    @property
    def val_batch_size(self) -> int | None: ...


def make_slots(env: EnvSection, factory: TextEnvFactory, num_slots: int) -> VectorEnv:
    """`num_slots` environments with the actors, their resources and the time-out that the configuration names."""
    resources = WorkerResources(env.resources_per_worker.num_cpus, env.resources_per_worker.num_gpus)
    return make_vector_env(factory, num_slots, env.num_workers, resources, timeout_s=env.worker_timeout)
