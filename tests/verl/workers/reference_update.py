# SPDX-License-Identifier: Apache-2.0
"""The updates of actor and critic written out: plain models, full padding, one sum over each whole mini-batch.

Nothing here is shared with the workers; gradient descent with clipping, so weights move in proportion to gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from verl.protocol import DataProto

ENTROPY_COEFF, KL_COEF, CLIP, DUAL_CLIP, VALUE_CLIP = 0.01, 0.1, 0.2, 3.0, 0.5
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

Columns = dict[str, Tensor]
Result = tuple[dict[str, Tensor], dict[str, float]]


def aggregate(values: Tensor, mask: Tensor, mode: str) -> Tensor:
    rows = [row[kept] for row, kept in zip(values, mask.bool()) if kept.any()]
    if mode == "token-mean":
        return torch.cat(rows).mean()
    if mode == "seq-mean-token-sum-norm":
        return torch.cat(rows).sum() / mask.shape[1]
    reduce = torch.sum if mode == "seq-mean-token-sum" else torch.mean
    return torch.stack([reduce(row) for row in rows]).mean()


def outputs_before_responses(model: nn.Module, columns: Columns) -> Tensor:
    mask = columns["attention_mask"]
    out = model(input_ids=columns["input_ids"], attention_mask=mask, position_ids=torch.clip(mask.cumsum(1) - 1, min=0))
    width = columns["responses"].shape[1]
    return out.logits[:, -width - 1 : -1]


def actor_loss(model: nn.Module, columns: Columns, mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    mask = columns["response_mask"]
    distribution = torch.log_softmax(outputs_before_responses(model, columns), dim=-1)
    new = distribution.gather(2, columns["responses"][..., None])[..., 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    ratio, advantages = torch.exp(new - columns["old_log_probs"]), columns["advantages"]
    pg = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    pg = torch.where(advantages < 0, torch.minimum(pg, -advantages * DUAL_CLIP), pg)
    gap = columns["ref_log_prob"] - new
    kl = torch.clamp(torch.exp(gap) - gap - 1, -10, 10)
    parts = {"actor/pg_loss": aggregate(pg, mask, mode), "actor/kl_loss": aggregate(kl, mask, mode)}
    total = parts["actor/pg_loss"] - ENTROPY_COEFF * aggregate(entropy, mask, mode) + KL_COEF * parts["actor/kl_loss"]
    return total, parts


def critic_loss(model: nn.Module, columns: Columns, mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    mask, returns, old = columns["response_mask"], columns["returns"], columns["values"]
    values = outputs_before_responses(model, columns)[..., 0]
    clipped = torch.minimum(torch.maximum(values, old - VALUE_CLIP), old + VALUE_CLIP)
    plain, limited = (values - returns) ** 2, (clipped - returns) ** 2
    loss = aggregate(torch.maximum(plain, limited), mask, mode)
    fraction = (limited > plain)[mask.bool()].float().mean()
    return loss, {
        "critic/vf_loss": loss,
        "critic/vf_clipfrac": fraction,
        "critic/vpred_mean": values[mask.bool()].mean(),
    }


def descend(model: nn.Module, batch: DataProto, size: int, grad_clip: float, loss_fn: Callable[..., object]) -> Result:
    columns: Columns = dict(batch.batch.items())
    collected: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(batch), size):
        total, parts = loss_fn(model, {name: column[start : start + size] for name, column in columns.items()})
        total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad
                    parameter.grad = None
        for name, value in parts.items():
            collected[name].append(float(value.detach()))
        collected["grad_norm"].append(float(norm))
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return weights, {name: sum(values) / len(values) for name, values in collected.items()}


def actor_update(folder: Path, batch: DataProto, size: int, mode: str, grad_clip: float = 1.0) -> Result:
    """Weights and metrics after one pass in mini-batches of ``size`` rows."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return descend(model, batch, size, grad_clip, lambda *args: actor_loss(*args, mode))


def critic_update(
    folder: Path, head: dict[str, Tensor], batch: DataProto, size: int, mode: str, grad_clip: float = 1.0
) -> Result:
    """The same for a value model with the given head."""
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    model.load_state_dict(head, strict=False)
    return descend(model, batch, size, grad_clip, lambda *args: critic_loss(*args, mode))
