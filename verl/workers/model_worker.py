# SPDX-License-Identifier: Apache-2.0
"""What the roles that train a model share: where its weights are, and its checkpoints."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config.model_sections import FSDPConfig
from verl.trainer.ppo.columns import tensors_of
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import resolve_device
from verl.utils.distributed import initialize_process_group
from verl.utils.flops_counter import FlopsCounter, device_peak_flops
from verl.utils.fsdp_utils import (
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)
from verl.workers.batching import row_lengths

__all__ = ["ModelMemory", "ModelWorker"]

_GIB = 1024.0**3


class ModelMemory:
    """Moves a model's weights and optimizer state between the device and host memory.

    On the CPU, and with ``offload_policy`` (FSDP itself fetches them), there is nothing to move.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, fsdp_config: FSDPConfig, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        movable = device.type == "cuda" and not fsdp_config.offload_policy
        self.is_movable = movable
        self.rests_on_host = movable and fsdp_config.param_offload
        """Whether the config keeps the weights in host memory between calls."""
        self.optimizer_rests_on_host = movable and fsdp_config.optimizer_offload

    def rest(self, *, optimizer: bool = True) -> None:
        """Move out what the config keeps in host memory between calls."""
        # The optimizer first: moving the model ends with handing torch's free blocks back to the device.
        if optimizer and self.optimizer_rests_on_host:
            offload_fsdp_optimizer(self.optimizer)
        if self.rests_on_host:
            offload_fsdp_model_to_cpu(self.model)

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """Weights (and optimizer state) where they are used, and back where they rest afterwards."""
        if self.rests_on_host:
            load_fsdp_model_to_gpu(self.model, self.device)
        if optimizer and self.optimizer_rests_on_host:
            load_fsdp_optimizer(self.optimizer, self.device)
        try:
            yield
        finally:
            self.rest(optimizer=optimizer)

    def release(self) -> None:
        """Move everything to host memory."""
        if self.is_movable:
            offload_fsdp_optimizer(self.optimizer)
            offload_fsdp_model_to_cpu(self.model)

    def restore(self) -> None:
        """Take back what `release` moved, except what rests in host memory anyway."""
        if self.is_movable and not self.rests_on_host:
            load_fsdp_model_to_gpu(self.model, self.device)
        if self.is_movable and not self.optimizer_rests_on_host:
            load_fsdp_optimizer(self.optimizer, self.device)


class ModelWorker(Worker):
    """One rank of a role; the subclass sets `memory`, `lr_scheduler`, `flops` and `checkpoints` for a trained model.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
    """

    memory: ModelMemory
    checkpoints: FSDPCheckpointManager
    flops: FlopsCounter
    lr_scheduler: LambdaLR

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = resolve_device(device)
        initialize_process_group(self.device)

    def _memory_metrics(self) -> dict[str, float]:
        # Linux reports the peak resident size in KiB.
        metrics = {"perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}
        if self.device.type == "cuda":
            metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(self.device) / _GIB
            metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(self.device) / _GIB
        return metrics

    def _end_of_update(self, role: str, data: DataProto, seconds: float, epochs: int) -> dict[str, float]:
        """Steps the schedule; the rate that was used, model FLOPs utilisation (``perf/mfu/{role}``) and memory.

        Args:
            data: what the update ran on; ``meta_info["global_token_num"]`` are the tokens of all ranks' rows (without
                it, other ranks count as this one).
        """
        metrics = {f"{role}/lr": float(self.memory.optimizer.param_groups[0]["lr"])}
        self.lr_scheduler.step()
        if "global_token_num" in data.meta_info:
            row_tokens = list(data.meta_info["global_token_num"])
        else:
            row_tokens = row_lengths(tensors_of(data)["attention_mask"]) * self.world_size
        achieved, _ = self.flops.estimate_flops(row_tokens, seconds)
        peak = device_peak_flops(self.device)
        if achieved > 0 and peak is not None:
            metrics[f"perf/mfu/{role}"] = achieved * 1e12 * epochs / (peak * self.world_size)
        return metrics | self._memory_metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_report(self) -> dict[str, float]:
        """This rank's peaks in GiB: resident host memory and, on CUDA, allocated and reserved device memory."""
        return self._memory_metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def release_device_memory(self) -> None:
        """Moves weights and optimizer state to host memory, so that another role of the process can use the device.

        Not for use inside a rollout session; outside of one the engine holds no weights anyway. `restore_device_memory`
        must come before this role computes again. On the CPU both do nothing.
        """
        self.memory.release()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_device_memory(self) -> None:
        """Takes back what `release_device_memory` moved, except what the config keeps in host memory between calls."""
        self.memory.restore()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str | Path, global_step: int = 0) -> None:
        """Writes this rank's part of the model into ``local_path``, see `FSDPCheckpointManager`."""
        with self.memory.on_device(optimizer=True):
            self.checkpoints.save_checkpoint(local_path, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str | Path | None) -> None:
        """Restores the model, its optimizer, schedule and random states; None does nothing.

        Raises:
            UserError: files of this rank are missing.
        """
        with self.memory.on_device(optimizer=True):
            self.checkpoints.load_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str | Path) -> None:
        """Writes the model as a Hugging Face folder with its tokenizer; adapters are merged into the weights."""
        with self.memory.on_device():
            self.checkpoints.export_hf(path)
