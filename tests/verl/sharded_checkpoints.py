# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints of the tiny model with gloo ranks, and what `save_hf_model` exports of the same models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp

from verl.single_controller.base.worker import free_port
from verl.trainer.config.model_sections import FSDPConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.distributed import initialize_process_group
from verl.utils.lora import LoRASettings
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.model_builder import build_model


@dataclass(frozen=True)
class Case:
    """One checkpoint: folder name, strategy, ranks of a shard group (-1: all), adapters, value model."""

    name: str
    strategy: str
    fsdp_size: int = -1
    lora: bool = False
    value_head: bool = False


CASES = (
    Case("fsdp", "fsdp"),
    Case("fsdp2", "fsdp2"),
    Case("fsdp_single", "fsdp", 1),
    Case("fsdp2_lora", "fsdp2", lora=True),
    Case("fsdp_lora", "fsdp", lora=True),
    Case("fsdp2_value", "fsdp2", value_head=True),
)
GROUPS_OF_TWO = (Case("fsdp_groups", "fsdp", 2), Case("fsdp2_groups", "fsdp2", 2))


def _rank_main(rank: int, port: int, model_dir: str, out: str, ranks: int, cases: Sequence[Case]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    device = torch.device("cpu")
    initialize_process_group(device)
    for case in cases:
        lora = LoRASettings(4, 8) if case.lora else None
        model = build_model(
            model_dir,
            strategy=case.strategy,
            device=device,
            fsdp_config=FSDPConfig(fsdp_size=case.fsdp_size),
            lora=lora,
            value_head=case.value_head,
        )
        with torch.no_grad():
            # Adapters and value heads start at zero, which would hide mistakes.
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.01)
        manager = FSDPCheckpointManager(
            model,
            processing_class=hf_tokenizer(model_dir),
            checkpoint_contents=("model", "hf_model"),
            lora=lora,
            value_head=case.value_head,
            base_model=model_dir,
        )
        manager.save_checkpoint(Path(out) / case.name)
    torch.distributed.destroy_process_group()


def write_checkpoints(model_dir: Path, out: Path, ranks: int, cases: Sequence[Case]) -> None:
    """Fill `out/{case}` for every case with that many ranks."""
    mp.spawn(_rank_main, args=(free_port("127.0.0.1"), str(model_dir), str(out), ranks, cases), nprocs=ranks)
