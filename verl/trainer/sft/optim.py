# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.errors import UserError
from verl.utils.selected_logits import output_head
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)

__all__ = ["build_optimizers", "build_schedules", "split_for_muon"]


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of linear layers inside the network, everything else).

    Embeddings, the output head, norms and biases are the rest: Muon is made for maps between hidden states.
    """
    outer = {id(p) for p in output_head(model).parameters()}
    outer |= {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and id(parameter) not in outer else rest).append(parameter)
    return matrices, rest


def build_optimizers(
    model: nn.Module,
    *,
    name: str = "adamw",
    lr: float,
    muon_lr: float = 0.02,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
) -> list[torch.optim.Optimizer]:
    """`adamw`: one AdamW. `muon`: Muon at `muon_lr` for hidden matrices and AdamW at `lr` for the rest.

    Raises:
        UserError: unknown name, or a torch without Muon.
    """
    if name == "adamw":
        trainable = [p for p in model.parameters() if p.requires_grad]
        return [torch.optim.AdamW(trainable, lr=lr, betas=betas, weight_decay=weight_decay)]
    if name != "muon":
        raise UserError(f"optim.name={name!r} is not known; use adamw or muon")
    try:
        from torch.optim import Muon
    except ImportError as error:
        raise UserError(
            f"optim.name=muon needs torch 2.9 or newer, this is {torch.__version__}; set optim.name=adamw"
        ) from error
    matrices, rest = split_for_muon(model)
    return [
        Muon(matrices, lr=muon_lr, weight_decay=weight_decay),
        torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay),
    ]


def build_schedules(
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    kind: str,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float = 0.0,
    done_steps: int = 0,
) -> list[LambdaLR]:
    """One schedule per optimizer (`constant`, `cosine` or `wsd`), standing at the 0-based step `done_steps`.

    Base rates are those of the optimizers' groups, whatever a loaded state says about the last rate used.
    """
    schedules = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        last = done_steps - 1
        if kind == "constant":
            schedules.append(get_constant_schedule_with_warmup(optimizer, warmup_steps, last))
        elif kind == "cosine":
            schedules.append(
                get_cosine_schedule_with_warmup(
                    optimizer, warmup_steps, total_steps, min_lr_ratio=min_lr_ratio, last_epoch=last
                )
            )
        elif kind == "wsd":
            schedules.append(
                get_wsd_schedule_with_warmup(
                    optimizer, warmup_steps, total_steps, min_lr_ratio=min_lr_ratio, last_epoch=last
                )
            )
        else:
            raise UserError(f"optim.lr_scheduler={kind!r} is not known; use one of: constant, cosine, wsd")
    return schedules
