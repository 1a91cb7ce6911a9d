# SPDX-License-Identifier: Apache-2.0
"""One driver program calls methods on groups of workers: on Ray actors (`.ray`) or in its own process (`.local`)."""

from __future__ import annotations

from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
