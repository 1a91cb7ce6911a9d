# SPDX-License-Identifier: Apache-2.0
"""What every back end shares: the worker, the group and how arguments travel between them. Needs no Ray."""

from __future__ import annotations

from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs, PendingCall, ResourcePool, WorkerGroup

__all__ = ["ClassWithInitArgs", "PendingCall", "ResourcePool", "Worker", "WorkerGroup"]
