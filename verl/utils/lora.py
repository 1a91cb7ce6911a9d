# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv 2106.09685) inside a Hugging Face model: add, switch off, merge, export.

Adapters are put into the model in place, so it keeps its class, its configuration and its output head; parameters of
an adapted layer ``X`` are called ``X.base_layer.*``, ``X.lora_A.default.weight`` (r, in) and
``X.lora_B.default.weight`` (out, r). Only adapters (and a value head) train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir
from verl.utils.selected_logits import output_head

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = [
    "ADAPTER_FOLDER",
    "LoRASettings",
    "adapters_off",
    "add_adapters",
    "load_adapter",
    "merge_adapters",
    "save_adapter",
]

ADAPTER_FOLDER = "lora_adapter"
"""Folder of a checkpoint that `peft` loads."""

_ADAPTER = "default"
_BASE = ".base_layer."
_PEFT_PREFIX = "base_model.model."
_PEFT_WEIGHTS = "adapter_model.safetensors"
# Adapters start from the same numbers on every rank and in every run.
_INIT_SEED = 0


@dataclass(frozen=True)
class LoRASettings:
    """Rank and scale of the adapters (``W + alpha / rank * B A``), and the layers that get one.

    ``target_modules``: ``all-linear`` (all but the output head), names (one fits every layer whose path ends with it),
    or a regular expression that matches whole paths.
    """

    rank: int
    alpha: int
    target_modules: str | tuple[str, ...] = "all-linear"

    @classmethod
    def of(cls, rank: int, alpha: int, target_modules: str | tuple[str, ...]) -> LoRASettings | None:
        """From a model section's three keys; None with rank 0."""
        return cls(rank, alpha, target_modules) if rank > 0 else None

    @property
    def scaling(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / self.rank


def add_adapters(
    model: nn.Module, settings: LoRASettings, config_key: str = "model.target_modules", *, value_head: bool = False
) -> None:
    """Freezes ``model`` and puts trainable adapters into it, ``B`` zero: the outputs stay as they are.

    Args:
        value_head: the model is a value model, whose head gets no adapter and trains as a whole.

    Raises:
        UserError: the target modules name no layer, one that is not linear, or one whose weight is tied.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    targets = settings.target_modules
    head = output_head(model) if value_head else None
    excluded = [name for name, module in model.named_modules() if module is head]
    lora_config = _lora_config(settings, _peft_targets(targets), exclude_modules=excluded or None)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_INIT_SEED)
        try:
            inject_adapter_in_model(lora_config, model, _ADAPTER)
        except ValueError as error:
            raise UserError(
                f"{config_key}={targets}: {' '.join(str(error).split())[:200]}; name linear layers, or all-linear"
            ) from error
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    wrong = [name for name, layer in layers.items() if not isinstance(layer.get_base_layer(), nn.Linear)]
    if wrong or not layers:
        what = f"{wrong[0]} is no linear layer" if wrong else "no layer has such a name"
        raise UserError(f"{config_key}={targets}: {what}; name linear layers, or all-linear")
    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    tied = [name for name, layer in layers.items() if owners[id(layer.get_base_layer().weight)] > 1]
    if tied:
        raise UserError(
            f"{config_key}={targets}: {tied[0]} shares its weight with another layer (tie_word_embeddings), which an "
            "adapter would tear apart; leave it out"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
    if head is not None:
        head.requires_grad_(True)


def _peft_targets(targets: str | tuple[str, ...]) -> str | list[str]:
    # A plain name is the commonest wish, but as a string peft takes it for an expression over whole paths.
    if isinstance(targets, str):
        return [targets] if targets.isidentifier() else targets
    return list(targets)


def _lora_config(settings: LoRASettings, targets: str | list[str], **options: Any) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0, bias="none", **options
    )


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes what it did before `add_adapters`; not for training."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    # A factor of 0 rather than peft's switch, which also turns requires_grad of the (sharded) adapters off and on.
    for layer in layers:
        layer.set_scale(_ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1.0)


def merge_adapters(weights: Iterable[tuple[str, Tensor]], settings: LoRASettings) -> Iterator[tuple[str, Tensor]]:
    """The plain model's ``(name, weight)`` from those of a model with adapters: ``W + scaling * B A`` in float32.

    Weights pass through one at a time; only an adapted layer waits for its three parts.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights:
        if _is_adapter(name):
            layer, _, part = name.partition(".lora_")
            waiting.setdefault(layer, {})[part[0]] = weight
        elif name.endswith(f"{_BASE}weight"):
            layer = name.removesuffix(f"{_BASE}weight")
            waiting.setdefault(layer, {})["W"] = weight
        else:
            yield name.replace(_BASE, "."), weight
            continue
        parts = waiting[layer]
        if len(parts) == 3:
            delta = parts["B"].float() @ parts["A"].float() * settings.scaling
            yield f"{layer}.weight", (parts["W"].float() + delta).to(parts["W"].dtype)
            del waiting[layer]
    if waiting:
        raise RuntimeError(f"adapted layers without all of their weights: {', '.join(sorted(waiting))}")


def save_adapter(
    weights: dict[str, Tensor], folder: str | Path, settings: LoRASettings, *, base_model: str, task_type: str
) -> None:
    """Writes a folder that ``peft.PeftModel.from_pretrained`` puts on the base model; an existing one is replaced.

    Args:
        weights: unsharded trainable weights by name: adapters and, for a value model, its whole head.
        base_model: folder or id of the model the adapters belong to.
        task_type: peft's, ``CAUSAL_LM`` or ``TOKEN_CLS``.
    """
    adapted = {name.partition(".lora_")[0] for name in weights if _is_adapter(name)}
    heads = sorted({name.split(".")[0] for name in weights if not _is_adapter(name)})
    lora_config = _lora_config(
        settings,
        # Written out: all-linear of the base model would take a value head for a layer to adapt.
        sorted(adapted),
        task_type=task_type,
        base_model_name_or_path=base_model,
        inference_mode=True,
        modules_to_save=heads or None,
    )
    adapter = f".{_ADAPTER}."
    tensors = {f"base_model.model.{name.replace(adapter, '.')}": tensor for name, tensor in weights.items()}
    with atomic_dir(folder, overwrite=True) as path:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
        lora_config.save_pretrained(str(path))


def load_adapter(folder: str | Path) -> dict[str, Tensor]:
    """The weights that `save_adapter` was given.

    Raises:
        UserError: the folder holds no adapter.
    """
    file = Path(folder) / _PEFT_WEIGHTS
    if not file.is_file():
        raise UserError(f"{file} is missing, so there is no adapter to load; choose a folder that holds one")
    weights = {}
    for name, weight in load_file(file).items():
        plain = name.removeprefix(_PEFT_PREFIX)
        if _is_adapter(plain):
            plain = f"{plain.removesuffix('.weight')}.{_ADAPTER}.weight"
        weights[plain] = weight
    return weights
