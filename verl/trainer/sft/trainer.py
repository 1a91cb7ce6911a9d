# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning with FSDP: one process, or one per device under torchrun."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from verl.trainer.config.schema import SFTConfig
from verl.trainer.sft.checkpoint import (
    ResumeState,
    find_checkpoint,
    load_optimizers,
    load_trained_adapter,
    read_resume_state,
    save_checkpoint,
)
from verl.trainer.sft.data import create_sft_dataset, token_rows
from verl.trainer.sft.optim import build_optimizers, build_schedules
from verl.trainer.sft.step import LossStats, accumulate_gradients, evaluate_loss
from verl.utils.dataset.chat import pad_id
from verl.utils.dataset.sft_batching import epoch_order, steps_per_epoch
from verl.utils.dataset.token_rows import TokenRows
from verl.utils.device import resolve_device
from verl.utils.distributed import initialize_process_group
from verl.utils.errors import UserError
from verl.utils.fsdp_utils import finite_step
from verl.utils.import_utils import import_external_libs
from verl.utils.lora import LoRASettings
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.tracking import Tracking
from verl.workers.model_builder import build_model

__all__ = ["FSDPSFTTrainer"]

logger = logging.getLogger(__name__)


class FSDPSFTTrainer:
    """Fine-tunes a causal language model on (prompt, response) rows.

    Construction loads tokenizer, data and model; `fit` trains. Under torchrun every rank makes one. The result does
    not depend on micro-batch size or number of ranks, except for the order of floating-point additions.

    Attributes a caller may use: `model`, `tokenizer`, `optimizers`, `train_rows`, `val_rows`, `global_step`,
    `total_steps`, `device`, `rank`, `world_size`.
    """

    def __init__(
        self, config: SFTConfig, *, train_rows: TokenRows | None = None, val_rows: TokenRows | None = None
    ) -> None:
        """Prepare a run.

        Args:
            config: a config that `validate_sft_config` accepts.
            train_rows, val_rows: token rows to use instead of `data.train_files` and `data.val_files`.

        Raises:
            UserError: missing or unsuitable files, columns, model, checkpoint or device.
        """
        self.config = config
        import_external_libs(config.model.external_lib, "model.external_lib")
        self.device = resolve_device(config.trainer.device)
        self.rank, self.world_size = initialize_process_group(self.device)
        self.group = dist.group.WORLD if self.world_size > 1 else None
        self._resume_from = None if config.trainer.resume_path is None else find_checkpoint(config.trainer.resume_path)
        self.tokenizer = hf_tokenizer(
            config.model.partial_pretrain,
            config_key="model.partial_pretrain",
            trust_remote_code=config.model.trust_remote_code,
        )
        self.train_rows = train_rows if train_rows is not None else self._read(config.data.train_files, "train_files")
        if val_rows is None and config.data.val_files:
            val_rows = self._read(config.data.val_files, "val_files")
        self.val_rows = val_rows
        self._batch_size = min(config.data.train_batch_size, len(self.train_rows))
        if self._batch_size < config.data.train_batch_size:
            logger.warning(
                "data.train_batch_size=%d but there are only %d rows: each step uses all of them",
                config.data.train_batch_size,
                len(self.train_rows),
            )
        self.steps_per_epoch = steps_per_epoch(len(self.train_rows), self._batch_size)
        self.total_steps = config.trainer.total_epochs * self.steps_per_epoch
        if config.trainer.total_training_steps is not None:
            self.total_steps = min(self.total_steps, config.trainer.total_training_steps)
        self.global_step = 0
        self._load_model()

    def _read(self, files: str | tuple[str, ...], key: str) -> TokenRows:
        data = self.config.data
        return token_rows(create_sft_dataset(files, data, self.tokenizer, f"data.{key}"), data)

    def _load_model(self) -> None:
        model = self.config.model
        self.lora = LoRASettings.of(model.lora_rank, model.lora_alpha, model.target_modules)
        # A checkpoint with adapters has them merged into its weights; the run goes on with the two apart.
        from_start = self._resume_from is None or self.lora is not None
        self.model: nn.Module = build_model(
            model.partial_pretrain if from_start else str(self._resume_from),
            strategy=model.strategy,
            device=self.device,
            trainable=True,
            fsdp_config=model.fsdp_config.to_fsdp_config(),
            override_config=model.override_config,
            enable_gradient_checkpointing=model.enable_gradient_checkpointing,
            trust_remote_code=model.trust_remote_code,
            use_remove_padding=self.config.use_remove_padding,
            use_liger=model.use_liger,
            lora=self.lora,
            config_key="model.partial_pretrain",
        )
        optim = self.config.optim
        self.optimizers = build_optimizers(
            self.model,
            name=optim.name,
            lr=optim.lr,
            muon_lr=optim.muon_lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
        )
        if self._resume_from is not None:
            self._resume(self._resume_from)
        self._schedules = build_schedules(
            self.optimizers,
            kind=optim.lr_scheduler,
            warmup_steps=int(optim.warmup_steps_ratio * self.total_steps),
            total_steps=self.total_steps,
            min_lr_ratio=optim.min_lr_ratio,
            done_steps=self.global_step,
        )

    def _resume(self, folder: Path) -> None:
        saved, now = read_resume_state(folder), self._resume_state()
        for name in ("seed", "train_batch_size", "num_rows", "lora_rank"):
            if getattr(saved, name) != getattr(now, name):
                raise UserError(
                    f"trainer.resume_path={folder} was written with {name}={getattr(saved, name)}, this run has "
                    f"{getattr(now, name)}, so it would not go on as it began; use the same data and settings"
                )
        if self.lora is not None:
            load_trained_adapter(folder, self.model)
        load_optimizers(folder, self.model, self.optimizers)
        self.global_step = saved.global_step
        logger.info("resumed from %s at step %d", folder, self.global_step)

    def _resume_state(self) -> ResumeState:
        return ResumeState(
            self.global_step,
            self.config.trainer.seed,
            self._batch_size,
            len(self.train_rows),
            self.total_steps,
            self.config.model.lora_rank,
        )

    def fit(self) -> dict[str, float]:
        """Train to `total_steps`, validating each epoch (and every `test_freq` steps); save at the end.

        Returns:
            The last values of the logged metrics (`train/loss`, `val/loss`, ...); the same on every rank.
        """
        trainer = self.config.trainer
        tracking = self._tracking()
        last: dict[str, float] = {}
        try:
            with self._progress() as progress:
                while self.global_step < self.total_steps:
                    metrics = self.training_step()
                    step, end = self.global_step, self.global_step == self.total_steps
                    if end or step % self.steps_per_epoch == 0 or _due(step, trainer.test_freq):
                        metrics |= self.validate()
                    if end or _due(step, trainer.save_freq):
                        self.save_checkpoint()
                    last |= metrics
                    if tracking is not None:
                        tracking.log(data=metrics, step=step)
                    progress.set_postfix_str(_summary(last), refresh=False)
                    progress.update()
        finally:
            if tracking is not None:
                tracking.close()
        return last

    def training_step(self) -> dict[str, float]:
        """One optimizer step on the global batch that belongs to `global_step`; raises `global_step` by one."""
        start = time.perf_counter()
        epoch, position = divmod(self.global_step, self.steps_per_epoch)
        order = epoch_order(len(self.train_rows), self.config.trainer.seed, epoch)
        indices = order[position * self._batch_size : (position + 1) * self._batch_size]
        self.model.train()
        with self._seeded():
            stats = accumulate_gradients(
                self.model,
                self.train_rows,
                indices,
                micro_batch_size=self.config.data.micro_batch_size_per_gpu,
                pad_token_id=pad_id(self.tokenizer),
                device=self.device,
                group=self.group,
                prompt_loss_weight=self.config.data.prompt_loss_weight,
                packed=self.config.use_remove_padding,
            )
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        grad_norm = finite_step(self.model, self.optimizers, self.config.optim.clip_grad)
        for schedule in self._schedules:
            schedule.step()
        self.global_step += 1
        return self._metrics(stats, grad_norm, rates, time.perf_counter() - start)

    def _metrics(self, stats: LossStats, grad_norm: float, rates: list[float], seconds: float) -> dict[str, float]:
        metrics = {
            "train/loss": stats.loss,
            "train/grad_norm": grad_norm,
            "train/skipped": 0.0 if math.isfinite(grad_norm) else 1.0,
            "train/lr": rates[-1],
            "train/epoch": self.global_step / self.steps_per_epoch,
            "perf/tokens_per_s": stats.num_tokens / seconds,
            "perf/padding_share": 1.0 - stats.num_tokens / max(1, stats.num_positions),
            "timing_s/step": seconds,
        }
        if len(rates) > 1:
            metrics["train/muon_lr"] = rates[0]
        return metrics

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Draws of dropout layers as a function of (seed, step, rank), without touching the caller's generators."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            mixed = (self.config.trainer.seed * 1_000_003 + self.global_step) * 65_537 + self.rank
            torch.manual_seed(mixed % 2**63)
            yield

    def validate(self) -> dict[str, float]:
        """Loss on all validation rows: `{"val/loss": ...}`, empty without validation rows. Collective."""
        if self.val_rows is None:
            return {}
        self.model.eval()
        stats = evaluate_loss(
            self.model,
            self.val_rows,
            micro_batch_size=self.config.data.micro_batch_size_per_gpu,
            pad_token_id=pad_id(self.tokenizer),
            device=self.device,
            group=self.group,
            packed=self.config.use_remove_padding,
        )
        return {"val/loss": stats.loss}

    def save_checkpoint(self) -> Path:
        """Write `{default_local_dir}/global_step_N` and return it. Collective."""
        folder = Path(self.config.trainer.default_local_dir).expanduser() / f"global_step_{self.global_step}"
        save_checkpoint(
            folder,
            model=self.model,
            optimizers=self.optimizers,
            tokenizer=self.tokenizer,
            state=self._resume_state(),
            trust_remote_code=self.config.model.trust_remote_code,
            lora=self.lora,
            base_model=self.config.model.partial_pretrain,
        )
        return folder

    def _tracking(self) -> Tracking | None:
        if self.rank != 0:
            return None
        trainer = self.config.trainer
        return Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            backends=trainer.logger,
            log_dir=Path(trainer.default_local_dir).expanduser(),
            config=asdict(self.config),
        )

    def _progress(self) -> Any:
        # Logs get a line a minute, a terminal a live one.
        return tqdm(
            total=self.total_steps,
            initial=self.global_step,
            desc="fine-tuning",
            unit="step",
            disable=self.rank != 0,
            mininterval=0.5 if sys.stderr.isatty() else 60.0,
            dynamic_ncols=True,
        )


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def _summary(metrics: dict[str, float]) -> str:
    shown = [("loss", "train/loss", ".3f"), ("val", "val/loss", ".3f"), ("tok/s", "perf/tokens_per_s", ",.0f")]
    return ", ".join(f"{label} {metrics[key]:{form}}" for label, key, form in shown if key in metrics)
