# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of supervised fine-tuning: a Hugging Face folder that also holds what a resumed run needs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from verl.utils.checkpoint.checkpoint_manager import TRACKER_FILE, find_latest_ckpt_path, read_tensors
from verl.utils.checkpoint.fsdp_checkpoint_manager import export_adapter, save_hf_model
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write
from verl.utils.fsdp_utils import full_options, quiet_no_shard, trainable_names
from verl.utils.lora import ADAPTER_FOLDER, LoRASettings, load_adapter

__all__ = [
    "RESUME_FOLDER",
    "ResumeState",
    "find_checkpoint",
    "last_checkpoint",
    "load_optimizers",
    "load_trained_adapter",
    "read_resume_state",
    "save_checkpoint",
]

logger = logging.getLogger(__name__)

RESUME_FOLDER = "resume"
"""Sub-folder of a checkpoint with optimizer state and counters; the rest is an ordinary Hugging Face folder."""

_OPTIMIZER_FILE = "optimizer.pt"
_STATE_FILE = "trainer_state.json"


@dataclass(frozen=True)
class ResumeState:
    """Counters of a run. The order of rows is a function of (seed, step), so they are all that is needed."""

    global_step: int
    seed: int
    train_batch_size: int
    num_rows: int
    total_steps: int
    lora_rank: int = 0


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tokenizer: Any,
    state: ResumeState,
    trust_remote_code: bool = False,
    lora: LoRASettings | None = None,
    base_model: str = "",
) -> None:
    """Write `folder` aside and rename it, then point `latest_checkpointed_iteration.txt` beside it to it.

    Collective: every rank calls it, rank 0 writes. An existing folder of that name is replaced. With adapters the
    folder holds the merged model, and `lora_adapter/` the adapters alone, which belong to `base_model`.
    """
    aside = folder.with_name(f"{folder.name}.tmp-saving")
    inner: Any = model
    save_hf_model(
        model,
        aside,
        tokenizer=tokenizer,
        generation_config=inner.generation_config,
        trust_remote_code=trust_remote_code,
        lora=lora,
    )
    if lora is not None:
        export_adapter(model, aside / ADAPTER_FOLDER, lora, base_model=base_model)
    with quiet_no_shard():
        moments = get_optimizer_state_dict(model, list(optimizers), options=full_options(model))
    if dist.get_rank() == 0:
        resume = aside / RESUME_FOLDER
        resume.mkdir()
        torch.save(moments, resume / _OPTIMIZER_FILE)
        atomic_write(resume / _STATE_FILE, json.dumps(asdict(state), indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
        atomic_write(folder.parent / TRACKER_FILE, f"{state.global_step}\n")
    # Nobody may look for the folder before it has its name.
    dist.barrier()


def last_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest finished checkpoint in the folder of a run; None when there is none."""
    newest = find_latest_ckpt_path(run_dir, marker=f"{RESUME_FOLDER}/{_STATE_FILE}")
    return None if newest is None else Path(newest)


def find_checkpoint(path: str | Path) -> Path:
    """`path` if it is a checkpoint, or the newest checkpoint in it.

    Raises:
        UserError: neither.
    """
    folder = Path(path).expanduser()
    if (folder / RESUME_FOLDER / _STATE_FILE).is_file():
        return folder
    newest = last_checkpoint(folder)
    if newest is None:
        raise UserError(
            f"trainer.resume_path={path}: {folder} is no checkpoint of this trainer and holds none; "
            "set it to a global_step_N folder, or to null to start anew"
        )
    return newest


def read_resume_state(folder: Path) -> ResumeState:
    """Counters of a checkpoint. Raises UserError when the file is broken."""
    file = folder / RESUME_FOLDER / _STATE_FILE
    try:
        return ResumeState(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is not the state of a run ({error}); choose another checkpoint") from error


def load_optimizers(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Load the optimizer state of a checkpoint; learning rates stay those of the given optimizers. Collective."""
    file = folder / RESUME_FOLDER / _OPTIMIZER_FILE
    if not file.is_file():
        raise UserError(f"{file} is missing; choose a checkpoint that this trainer wrote")
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # The saved groups carry what a schedule adds; torch wants the same keys here.
            group["initial_lr"] = group["lr"]
    state = read_tensors(file)
    with quiet_no_shard():
        set_optimizer_state_dict(model, list(optimizers), state, options=full_options(model))
    for optimizer, kept in zip(optimizers, rates):
        for group, rate in zip(optimizer.param_groups, kept):
            group["lr"] = rate


def load_trained_adapter(folder: Path, model: nn.Module) -> None:
    """Load the adapters of a checkpoint into a model whose base weights are loaded already. Collective.

    Raises:
        UserError: the checkpoint has no adapters, or not those of this model.
    """
    weights: dict[str, Any] = dict(load_adapter(folder / ADAPTER_FOLDER))
    trained = trainable_names(model)
    if set(weights) != trained:
        odd = sorted(trained.symmetric_difference(weights))[0]
        raise UserError(
            f"trainer.resume_path={folder} holds other adapters than this model ({odd} is in only one of the two); "
            "resume with the same model.lora_rank and model.target_modules"
        )
    options = StateDictOptions(full_state_dict=True, strict=False)
    with quiet_no_shard():
        set_model_state_dict(model, weights, options=options)
