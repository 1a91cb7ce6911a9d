# SPDX-License-Identifier: Apache-2.0
"""The discriminator as a worker role, co-located with the actor: scoring, online fine-tuning, checkpoints.

Between calls its weights and optimizer state are in host memory; a call brings what it needs to the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from agent_system.step_discriminator.discriminator import DiscriminatorConfig, DiscriminatorScorer
from agent_system.step_discriminator.step_prompt import (
    CreditRow,
    EpisodeText,
    build_prompts,
    credit_rows,
    rows_to_tokens,
)
from agent_system.trajectory import Trajectory
from recipe.traj_evolve.options import TrajEvolveConfig
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config.model_sections import FSDPConfig
from verl.trainer.sft.step import accumulate_gradients
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.dataset.sft_dataset import pad_id
from verl.utils.device import resolve_device
from verl.utils.distributed import initialize_process_group
from verl.utils.fsdp_utils import (
    finite_step,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.model_builder import build_model, build_optimizer

__all__ = ["DISCRIMINATOR_PATH_KEY", "DiscriminatorWorker"]

DISCRIMINATOR_PATH_KEY = "traj_evolve.discriminator_model_path"
_MAX_GRAD_NORM = 1.0
_GIB = 1024.0**3


class DiscriminatorWorker(Worker):
    """One rank of the step-credit discriminator.

    Args:
        options: the `traj_evolve` group.
        device: `cpu`, `cuda` or `auto`.
        strategy: `fsdp` or `fsdp2`, as the actor's.
        fsdp_config: the actor's; its offload switches do not count, as the discriminator always rests in host memory.
        gradient_checkpointing: recompute activations in updates, as the actor does.
    """

    def __init__(
        self,
        options: TrajEvolveConfig,
        device: str,
        strategy: str = "fsdp2",
        fsdp_config: FSDPConfig | None = None,
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.options = options
        self.strategy = strategy
        self.fsdp_config = replace(
            fsdp_config or FSDPConfig(), param_offload=False, optimizer_offload=False, offload_policy=False
        )
        self.gradient_checkpointing = gradient_checkpointing
        self.trust_remote_code = trust_remote_code
        self.device = resolve_device(device)
        self.has_own_memory = self.device.type == "cuda"
        """Whether device and host memory differ; otherwise nothing is moved."""
        self._device_memory: dict[str, float] = {}
        initialize_process_group(self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load tokenizer, model and settings of stage 2's folder; build the optimizer.

        Raises:
            UserError: the folder is missing or no discriminator.
        """
        path = str(self.options.discriminator_model_path)
        self.config = DiscriminatorConfig.load(
            path, threshold=self.options.step_credit_value, batch_trajectories=self.options.score_batch_size
        )
        self.tokenizer = hf_tokenizer(path, config_key=DISCRIMINATOR_PATH_KEY, trust_remote_code=self.trust_remote_code)
        self.model = build_model(
            path,
            strategy=self.strategy,
            device=self.device,
            fsdp_config=self.fsdp_config,
            enable_gradient_checkpointing=self.gradient_checkpointing,
            trust_remote_code=self.trust_remote_code,
            # Scoring all steps from one shared prefix needs an attention that takes a mask.
            attn_implementation="sdpa",
            config_key=DISCRIMINATOR_PATH_KEY,
        )
        self.optimizer = build_optimizer(self.model, lr=self.options.discriminator_lr)
        self.scorer = DiscriminatorScorer(
            self.model, self.tokenizer, self.config, group=dist.group.WORLD, device=self.device
        )
        self.checkpoints = FSDPCheckpointManager(
            self.model,
            self.optimizer,
            processing_class=self.tokenizer,
            # Without the process-wide random states: they belong to the actor's checkpoint.
            checkpoint_contents=("model", "optimizer"),
            trust_remote_code=self.trust_remote_code,
        )
        self._to_host()

    # ---- memory

    def _to_host(self) -> None:
        if self.has_own_memory:
            offload_fsdp_optimizer(self.optimizer)
            offload_fsdp_model_to_cpu(self.model)
            self._note_device_memory("rest")

    @contextmanager
    def _on_device(self, phase: str, *, optimizer: bool = False) -> Iterator[None]:
        """Weights (and optimizer state) on the device, and back in host memory afterwards."""
        if self.has_own_memory:
            load_fsdp_model_to_gpu(self.model, self.device)
            if optimizer:
                load_fsdp_optimizer(self.optimizer, self.device)
        try:
            yield
            if self.has_own_memory:
                self._note_device_memory(phase)
        finally:
            self._to_host()

    def _note_device_memory(self, phase: str) -> None:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            self._device_memory[phase] = (total - free) / _GIB

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_memory(self) -> dict[str, float]:
        """Used memory of this rank's device in GiB, all processes together, at the end of the last `score`, `update`
        and `rest` (the discriminator moved out again); empty on the CPU. Freed blocks that torch keeps are included,
        so the peak inside the phase is."""
        return dict(self._device_memory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def placement(self) -> dict[str, str]:
        """Where every weight and optimizer tensor is: `{parameters, optimizer}` -> comma-separated device types."""
        parameters = {parameter.device.type for parameter in self.model.parameters()}
        states = {
            value.device.type
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }
        return {"parameters": ",".join(sorted(parameters)), "optimizer": ",".join(sorted(states))}

    # ---- scoring and updates

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        """`trajectory` (object column) -> `credit`: one (T,) float32 array a row, P(necessary) of every step."""
        trajectories: list[Trajectory] = list(data.non_tensor_batch["trajectory"])
        with self._on_device("score"), torch.no_grad():
            credits = self.scorer.score(trajectories)
        column = np.empty(len(credits), dtype=object)
        column[:] = credits
        return DataProto.from_dict(tensors={}, non_tensors={"credit": column})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update(
        self, trajectories: Sequence[Trajectory], labels: Sequence[Sequence[int]], seed: Sequence[int]
    ) -> dict[str, float]:
        """Fine-tune on labelled successes; every rank gets all of them and handles its share.

        Args:
            labels: per trajectory, 1 necessary or 0 redundant for every step.
            seed: of the row order.

        Returns:
            `discriminator_loss` (mean over the optimizer steps; missing without rows), `discriminator_rows`,
            `discriminator_skipped_steps`.
        """
        rows = self._rows(trajectories, labels)
        if not rows:
            return {"discriminator_rows": 0.0, "discriminator_skipped_steps": 0.0}
        tokens = rows_to_tokens(rows, self.tokenizer, self.config.max_length)
        rng = np.random.default_rng(list(seed))
        losses: list[float] = []
        skipped = 0
        self.model.train()
        with self._on_device("update", optimizer=True):
            for _ in range(self.options.discriminator_epochs):
                order = rng.permutation(len(rows))
                for start in range(0, len(rows), self.options.update_batch_size):
                    stats = accumulate_gradients(
                        self.model,
                        tokens,
                        order[start : start + self.options.update_batch_size],
                        micro_batch_size=self.options.micro_batch_size_per_gpu,
                        pad_token_id=pad_id(self.tokenizer),
                        device=self.device,
                        group=dist.group.WORLD,
                    )
                    losses.append(stats.loss)
                    norm = finite_step(self.model, [self.optimizer], _MAX_GRAD_NORM)
                    skipped += not math.isfinite(norm)
        return {
            "discriminator_loss": float(np.mean(losses)),
            "discriminator_rows": float(len(rows)),
            "discriminator_skipped_steps": float(skipped),
        }

    def _rows(self, trajectories: Sequence[Trajectory], labels: Sequence[Sequence[int]]) -> list[CreditRow]:
        rows: list[CreditRow] = []
        for trajectory, label in zip(trajectories, labels, strict=True):
            episode = EpisodeText.from_trajectory(trajectory)
            prompts = build_prompts(episode, self.tokenizer, self.config.max_length)
            if prompts.fits:
                rows += credit_rows(trajectory.traj_uid, episode, label, prompts)
        return rows

    # ---- checkpoints

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, global_step: int) -> None:
        """Write this rank's shards of weights and optimizer."""
        with self._on_device("save", optimizer=True):
            self.checkpoints.save_checkpoint(local_path, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Restore what `save_checkpoint` wrote with as many ranks; the learning rate stays this run's."""
        with self._on_device("load", optimizer=True):
            self.checkpoints.load_checkpoint(local_path)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.discriminator_lr
