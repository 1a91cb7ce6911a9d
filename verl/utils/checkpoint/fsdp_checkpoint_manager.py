# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FSDP models: every rank writes its own shards, and rank 0 what loads with ``from_pretrained``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir
from verl.utils.fsdp_utils import full_state_dict, quiet_no_shard, reshard

__all__ = ["FSDPCheckpointManager", "save_hf_model"]

logger = logging.getLogger(__name__)

_SHARDED = StateDictOptions(full_state_dict=False, cpu_offload=True)


def save_hf_model(
    model: nn.Module,
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Gathers a (sharded) causal language model and writes a Hugging Face folder, weights in the stored dtype.

    A collective; rank 0 writes, aside first and then under the final name. An existing folder is replaced.
    """
    reshard(model)
    weights = full_state_dict(model, rank0_only=True)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    config: PretrainedConfig = model.config  # type: ignore[assignment]
    # Only a shell for save_pretrained: on the meta device it has no memory of its own.
    dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if generation_config is not None:
        shell.generation_config = generation_config
    with atomic_dir(path, overwrite=True) as folder:
        shell.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


class FSDPCheckpointManager(BaseCheckpointManager):
    """Saves and restores a model sharded by FSDP1 or FSDP2 (or plain), with optimizer, schedule and random states.

    Files, with world size W and rank r: ``model_world_size_W_rank_r.pt``, ``optim_world_size_W_rank_r.pt``,
    ``extra_state_world_size_W_rank_r.pt`` = ``{lr_scheduler, rng, generators}``; the Hugging Face configuration and
    tokenizer beside them; ``huggingface/`` when ``hf_model`` is in the contents. Restoring needs the same W.

    Args:
        checkpoint_contents: of ``model, optimizer, extra, hf_model``.
        generators: named generators of the role whose states belong to ``extra``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: LambdaLR | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        checkpoint_contents: Sequence[str] = ("model", "optimizer", "extra"),
        *,
        generation_config: GenerationConfig | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.processing_class = processing_class
        self.contents = frozenset(checkpoint_contents)
        self.generation_config = generation_config
        self.generators = dict(generators or {})
        self.trust_remote_code = trust_remote_code
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def shard_path(self, folder: str | Path, kind: str) -> Path:
        """This rank's file; ``kind`` is ``model``, ``optim`` or ``extra_state``."""
        return Path(folder) / f"{kind}_world_size_{self.world_size}_rank_{self.rank}.pt"

    def save_checkpoint(self, local_path: str | Path, global_step: int = 0) -> None:
        """See `BaseCheckpointManager.save_checkpoint`."""
        folder = Path(local_path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        reshard(self.model)
        with quiet_no_shard():
            if "model" in self.contents:
                torch.save(get_model_state_dict(self.model, options=_SHARDED), self.shard_path(folder, "model"))
            if "optimizer" in self.contents and self.optimizer is not None:
                torch.save(self._optimizer_state(self.optimizer), self.shard_path(folder, "optim"))
        if "extra" in self.contents:
            torch.save(self._extra_state(), self.shard_path(folder, "extra_state"))
        if self.rank == 0:
            self._save_description(folder)
        if "hf_model" in self.contents:
            save_hf_model(
                self.model,
                folder / "huggingface",
                tokenizer=self.processing_class,
                generation_config=self.generation_config,
                trust_remote_code=self.trust_remote_code,
            )
        if dist.is_initialized():
            # Nobody may rename the folder before every rank has written its part.
            dist.barrier()
        logger.info("saved checkpoint of step %d to %s", global_step, folder)

    def load_checkpoint(self, local_path: str | Path | None) -> None:
        """Restores model, optimizer, schedule and random states; what the contents leave out stays as it is.

        Raises:
            UserError: a file of this rank is missing (another world size, or not a checkpoint folder).
        """
        if local_path is None:
            return
        folder = Path(local_path).expanduser()
        reshard(self.model)
        with quiet_no_shard():
            if "model" in self.contents:
                set_model_state_dict(self.model, self._read(folder, "model"), options=_SHARDED)
            if "optimizer" in self.contents and self.optimizer is not None:
                state = self._read(folder, "optim")
                if state is None:
                    self.optimizer.state.clear()
                else:
                    set_optimizer_state_dict(self.model, self.optimizer, state, options=_SHARDED)
        if "extra" in self.contents:
            extra = self._read(folder, "extra_state")
            if self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
            for name, generator in self.generators.items():
                if name in extra["generators"]:
                    generator.set_state(extra["generators"][name])
            self.load_rng_state(extra["rng"])

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        # Asked for the state of an optimizer that has never stepped, torch fills it in with step counter 1, which
        # would change the first real step; None stands for "fresh".
        if not optimizer.state:
            return None
        return get_optimizer_state_dict(self.model, optimizer, options=_SHARDED)

    def _extra_state(self) -> dict[str, Any]:
        return {
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "rng": self.get_rng_state(),
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
        }

    def _save_description(self, folder: Path) -> None:
        self.model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _read(self, folder: Path, kind: str) -> Any:
        path = self.shard_path(folder, kind)
        if not path.is_file():
            others = sorted(folder.glob(f"{kind}_world_size_*_rank_0.pt"))
            reason = f"it was saved by another number of ranks: {others[0].name}" if others else "no such file"
            raise UserError(
                f"checkpoint {folder} cannot be restored: {path.name} is missing ({reason}); resume with the same "
                "number of ranks, or choose another folder with trainer.resume_from_path"
            )
        # Shards are DTensors, which the restricted loader does not know; checkpoints are the user's own files.
        return torch.load(path, map_location="cpu", weights_only=False)
