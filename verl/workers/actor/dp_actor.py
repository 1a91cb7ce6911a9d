# SPDX-License-Identifier: Apache-2.0
"""Data-parallel PPO policy.

A mini-batch's loss is normalised by its own token (or row) count over all ranks, so the update does not depend on
micro-batch size, packing, dynamic batching or the number of ranks, and rows with an empty response mask change nothing.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.protocol import DataProto
from verl.trainer.config.worker_sections import ActorConfig
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss, kl_penalty
from verl.utils.distributed import all_reduce_sums
from verl.utils.fsdp_utils import clip_grad_norm, reshard
from verl.workers.actor.base import BasePPOActor
from verl.workers.actor.forward import MicroBatching, ResponseForward

__all__ = ["DataParallelPPOActor", "response_mask_of"]

logger = logging.getLogger(__name__)

_UPDATE_COLUMNS = ("input_ids", "attention_mask", "response_mask", "old_log_probs", "advantages")


def response_mask_of(data: DataProto) -> Tensor:
    """``response_mask`` of the batch, else the attention mask of its response columns; ``(B, R)``."""
    batch = tensors_of(data)
    if "response_mask" in batch:
        return batch["response_mask"]
    return batch["attention_mask"][:, -batch["responses"].shape[1] :]


@dataclass(frozen=True)
class _Counts:
    """Size of one mini-batch over all ranks."""

    tokens: float
    rows: float


class DataParallelPPOActor(BasePPOActor):
    """Policy over a (sharded) causal language model.

    Args:
        config: the ``actor_rollout_ref.actor`` section.
        model: the policy; gradients are averaged over ranks by FSDP.
        optimizer: None for a policy that only scores.
        use_remove_padding: pack rows, see `ResponseForward`.
        score_batching: micro-batches of `compute_log_prob`.
        update_batching: micro-batches of `update_policy`.
    """

    def __init__(
        self,
        config: ActorConfig,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device,
        use_remove_padding: bool = False,
        score_batching: MicroBatching,
        update_batching: MicroBatching | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.score_batching = score_batching
        self.update_batching = update_batching or score_batching
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._forward = ResponseForward(model, packed=use_remove_padding)

    @torch.no_grad()
    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the responses at ``meta_info["temperature"]``, and their entropies if asked for.

        Args:
            data: ``input_ids, attention_mask`` ``(B, P + R)``, ``responses`` ``(B, R)``, optional ``response_mask``.
        """
        was_training = self.model.training
        self.model.eval()
        batch = tensors_of(data)
        token_mask = response_mask_of(data)
        log_probs = torch.zeros(token_mask.shape, dtype=torch.float32)
        entropys = torch.zeros_like(log_probs) if calculate_entropy else None
        for index in self.score_batching.split(_lengths(batch["attention_mask"])):
            scores = self._forward(
                batch["input_ids"][index].to(self.device),
                batch["attention_mask"][index].to(self.device),
                token_mask[index].to(self.device),
                temperature=float(data.meta_info["temperature"]),
                with_entropy=calculate_entropy,
            )
            log_probs[index] = scores.log_probs.cpu()
            if entropys is not None and scores.entropy is not None:
                entropys[index] = scores.entropy.cpu()
        # Without reshard_after_forward, a forward pass that no backward follows leaves FSDP2 units gathered, and a
        # later change of the shards (a restored checkpoint) would not reach them.
        reshard(self.model)
        self.model.train(was_training)
        return log_probs, entropys

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """``ppo_epochs`` passes over the rows in order, one optimizer step per mini-batch.

        Args:
            data: this rank's rows: ``input_ids, attention_mask, responses, response_mask, old_log_probs, advantages``,
                and ``ref_log_prob`` with ``use_kl_loss``; ``meta_info["temperature"]``. Equal row counts on all ranks.

        Returns:
            Means over the mini-batches of ``actor/{pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower, grad_norm}`` (and
            ``kl_loss, kl_coef``), and ``actor/skipped_steps``: steps left out because the gradient was not finite.
        """
        if self.optimizer is None:
            raise RuntimeError("this policy has no optimizer: it only scores")
        self.model.train()
        mini_batches = self._mini_batches(data)
        counts = self._count(mini_batches)
        collected: dict[str, list[float]] = defaultdict(list)
        skipped = 0
        for _ in range(self.config.ppo_epochs):
            for mini_batch, count in zip(mini_batches, counts):
                if count.tokens == 0:
                    # Nothing to learn from; a step would still move weights by momentum and weight decay.
                    continue
                sums = self._accumulate(mini_batch, count)
                grad_norm = self._step()
                if grad_norm is None:
                    skipped += 1
                    continue
                for name, value in all_reduce_sums(sums, self.device).items():
                    collected[f"actor/{name}"].append(value)
                collected["actor/grad_norm"].append(grad_norm)
        metrics = {name: sum(values) / len(values) for name, values in collected.items()}
        metrics["actor/skipped_steps"] = float(skipped)
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return metrics

    def _mini_batches(self, data: DataProto) -> list[DataProto]:
        names = [*_UPDATE_COLUMNS, *(["ref_log_prob"] if self.config.use_kl_loss else [])]
        data = data.select(batch_keys=names)
        size = self.config.ppo_mini_batch_size // self.world_size
        if size == 0:
            raise ValueError(
                f"actor.ppo_mini_batch_size={self.config.ppo_mini_batch_size} is smaller than the {self.world_size} "
                "ranks; every rank needs at least one row of a mini-batch"
            )
        return [data.slice(start, min(start + size, len(data))) for start in range(0, len(data), size)]

    def _count(self, mini_batches: list[DataProto]) -> list[_Counts]:
        local: dict[str, float] = {}
        for number, mini_batch in enumerate(mini_batches):
            lengths = tensors_of(mini_batch)["response_mask"].sum(dim=1)
            local[f"{number}/tokens"] = float(lengths.sum())
            local[f"{number}/rows"] = float((lengths > 0).sum())
        summed = all_reduce_sums(local, self.device)
        return [_Counts(summed[f"{i}/tokens"], summed[f"{i}/rows"]) for i in range(len(mini_batches))]

    def _accumulate(self, mini_batch: DataProto, count: _Counts) -> dict[str, float]:
        """Forward and backward over the micro-batches; this rank's share of each metric."""
        sums: dict[str, Tensor] = {}
        for index in self.update_batching.split(_lengths(tensors_of(mini_batch)["attention_mask"])):
            micro = tensors_of(mini_batch)[index].to(self.device)
            loss, parts = self._loss(micro, count, float(mini_batch.meta_info["temperature"]))
            # FSDP averages gradients over ranks; the loss is already a share of the global mini-batch's.
            (loss * self.world_size).backward()
            for name, value in parts.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
        return {name: value.item() for name, value in sums.items()}

    def _loss(self, micro: TensorDict, count: _Counts, temperature: float) -> tuple[Tensor, dict[str, Tensor]]:
        config, mask = self.config, micro["response_mask"]
        scores = self._forward(
            micro["input_ids"],
            micro["attention_mask"],
            mask,
            temperature=temperature,
            with_entropy=config.entropy_coeff != 0,
        )
        policy = get_policy_loss(config.policy_loss.loss_mode)(
            micro["old_log_probs"], scores.log_probs, micro["advantages"], mask, config
        )

        def aggregate(values: Tensor, mode: str) -> Tensor:
            return agg_loss(values, mask, mode, num_tokens=count.tokens, num_rows=count.rows)

        loss = aggregate(policy.per_token_loss, policy.agg_mode or config.loss_agg_mode)
        parts = {"pg_loss": loss.detach()}
        parts.update({name: value / count.tokens for name, value in policy.metrics.items()})
        if scores.entropy is not None:
            loss = loss - config.entropy_coeff * aggregate(scores.entropy, config.loss_agg_mode)
        if config.use_kl_loss:
            kl = kl_penalty(scores.log_probs, micro["ref_log_prob"], config.kl_loss_type)
            kl_loss = aggregate(kl, config.loss_agg_mode)
            loss = loss + config.kl_loss_coef * kl_loss
            parts["kl_loss"] = kl_loss.detach()
        return loss, parts

    def _step(self) -> float | None:
        """Clips and steps; the gradient norm before clipping, or None when the step was left out."""
        assert self.optimizer is not None
        grad_norm = float(clip_grad_norm(self.model, self.config.grad_clip))
        finite = math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
        else:
            logger.warning("gradient norm is %s: step skipped", grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm if finite else None


def _lengths(attention_mask: Tensor) -> list[int]:
    return attention_mask.sum(dim=1).tolist()
