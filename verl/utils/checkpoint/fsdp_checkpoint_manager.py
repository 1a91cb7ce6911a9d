# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FSDP models: every rank writes its own shards, and rank 0 what loads with ``from_pretrained``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.utils.logging as hf_logging
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
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager, read_tensors
from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir
from verl.utils.fsdp_utils import full_state_dict, quiet_no_shard, reshard, trainable_names
from verl.utils.lora import ADAPTER_FOLDER, LoRASettings, merge_adapters, save_adapter

__all__ = ["FSDPCheckpointManager", "export_adapter", "save_hf_model", "write_hf_folder"]

logger = logging.getLogger(__name__)

_SHARDED = StateDictOptions(full_state_dict=False, cpu_offload=True)


def save_hf_model(
    model: nn.Module,
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
    trust_remote_code: bool = False,
    value_head: bool = False,
    lora: LoRASettings | None = None,
) -> None:
    """Gathers a (sharded) model and writes a Hugging Face folder, weights in the stored dtype.

    A collective; rank 0 writes, aside first and then under the final name. An existing folder is replaced.

    Args:
        value_head: the model is a token classifier rather than a causal language model.
        lora: the model's adapters, which are merged into its weights.
    """
    reshard(model)
    weights = full_state_dict(model, rank0_only=True)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if lora is not None:
        weights = dict(merge_adapters(weights.items(), lora))
    write_hf_folder(
        path,
        weights,
        model.config,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        generation_config=generation_config,
        trust_remote_code=trust_remote_code,
        value_head=value_head,
    )


def write_hf_folder(
    path: str | Path,
    weights: dict[str, torch.Tensor],
    config: PretrainedConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
    trust_remote_code: bool = False,
    value_head: bool = False,
) -> None:
    """Write unsharded weights as a Hugging Face folder, aside first; arguments as in `save_hf_model`."""
    # Only a shell for save_pretrained: on the meta device it has no memory of its own.
    dtype = next(iter(weights.values())).dtype
    auto_class = AutoModelForTokenClassification if value_head else AutoModelForCausalLM
    with torch.device("meta"):
        shell = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if generation_config is not None:
        shell.generation_config = generation_config
    hf_logging.disable_progress_bar()
    with atomic_dir(path, overwrite=True) as folder:
        shell.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def export_adapter(
    model: nn.Module, folder: str | Path, lora: LoRASettings, *, base_model: str, value_head: bool = False
) -> None:
    """Gathers what trains of a (sharded) model with adapters and writes it for `peft`, see `save_adapter`.

    A collective; rank 0 writes.
    """
    trained = trainable_names(model)
    weights = full_state_dict(model, rank0_only=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_adapter(
            {name: weight for name, weight in weights.items() if name in trained},
            folder,
            lora,
            base_model=base_model,
            task_type="TOKEN_CLS" if value_head else "CAUSAL_LM",
        )


class FSDPCheckpointManager(BaseCheckpointManager):
    """Saves and restores a model sharded by FSDP1 or FSDP2 (or plain), with optimizer, schedule and random states.

    Files, with world size W and rank r: ``model_world_size_W_rank_r.pt``, ``optim_world_size_W_rank_r.pt``,
    ``extra_state_world_size_W_rank_r.pt`` = ``{lr_scheduler, rng, generators}``; the Hugging Face configuration and
    tokenizer beside them; ``huggingface/`` when ``hf_model`` is in the contents. Restoring needs the same W.

    With adapters the model file holds what trains (adapters, a value head), ``lora_adapter/`` the same for `peft`, and
    ``huggingface/`` the model with its adapters merged.

    Args:
        checkpoint_contents: of ``model, optimizer, extra, hf_model``.
        generators: named generators of the role whose states belong to ``extra``.
        value_head: the model is a token classifier rather than a causal language model.
        lora: the model's adapters.
        base_model: folder or id that adapters name as their base.
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
        value_head: bool = False,
        lora: LoRASettings | None = None,
        base_model: str = "",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.processing_class = processing_class
        self.contents = frozenset(checkpoint_contents)
        self.generation_config = generation_config
        self.generators = dict(generators or {})
        self.trust_remote_code = trust_remote_code
        self.value_head = value_head
        self.lora = lora
        self.base_model = base_model
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
                torch.save(self._model_state(), self.shard_path(folder, "model"))
            if "optimizer" in self.contents and self.optimizer is not None:
                torch.save(self._optimizer_state(self.optimizer), self.shard_path(folder, "optim"))
        if "extra" in self.contents:
            torch.save(self._extra_state(), self.shard_path(folder, "extra_state"))
        if self.rank == 0:
            self._save_description(folder)
        if self.lora is not None:
            export_adapter(
                self.model, folder / ADAPTER_FOLDER, self.lora, base_model=self.base_model, value_head=self.value_head
            )
        if "hf_model" in self.contents:
            self.export_hf(folder / "huggingface")
        if dist.is_initialized():
            # Nobody may rename the folder before every rank has written its part.
            dist.barrier()
        logger.info("saved checkpoint of step %d to %s", global_step, folder)

    def load_checkpoint(self, local_path: str | Path | None) -> None:
        """Restores model, optimizer, schedule and random states; what the contents leave out stays as it is.

        Raises:
            UserError: a file of this rank is missing (another world size, or not a checkpoint folder) or damaged.
        """
        if local_path is None:
            return
        folder = Path(local_path).expanduser()
        reshard(self.model)
        with quiet_no_shard():
            if "model" in self.contents:
                self._load_model(folder)
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

    def export_hf(self, path: str | Path) -> None:
        """Write a Hugging Face folder, see `save_hf_model`; a collective."""
        save_hf_model(
            self.model,
            path,
            tokenizer=self.processing_class,
            generation_config=self.generation_config,
            trust_remote_code=self.trust_remote_code,
            value_head=self.value_head,
            lora=self.lora,
        )

    def _model_state(self) -> dict[str, Any]:
        state = get_model_state_dict(self.model, options=_SHARDED)
        if self.lora is None:
            return state
        trained = trainable_names(self.model)
        return {name: tensor for name, tensor in state.items() if name in trained}

    def _load_model(self, folder: Path) -> None:
        state = self._read(folder, "model")
        own: dict[str, Any] = get_model_state_dict(self.model, options=StateDictOptions())
        expected = own.keys() if self.lora is None else trainable_names(self.model)
        for name in sorted(state.keys() | expected):
            there = tuple(state[name].shape) if name in state else "missing"
            here = tuple(own[name].shape) if name in expected else "missing"
            if there != here:
                raise UserError(
                    f"checkpoint {folder} is of another model ({name} is {there} there and {here} here); resume with "
                    "the model.path, model.lora_rank and model.target_modules that it was trained with"
                )
        # With adapters the frozen rest is the base model's, loaded already.
        set_model_state_dict(self.model, state if self.lora is None else own | state, options=_SHARDED)

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
        return read_tensors(path)
