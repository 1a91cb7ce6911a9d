# SPDX-License-Identifier: Apache-2.0
"""Data-parallel PPO policy: log-probabilities of responses, and updates by `verl.workers.updates`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.protocol import DataProto
from verl.trainer.config.worker_sections import ActorConfig
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss, kl_penalty
from verl.utils.fsdp_utils import reshard
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.actor.base import BasePPOActor
from verl.workers.batching import MicroBatching, row_lengths
from verl.workers.forward import RowForward
from verl.workers.updates import BatchCounts, UpdateLoop, response_mask_of

__all__ = ["DataParallelPPOActor", "TokenScores", "score_responses"]

_UPDATE_COLUMNS = ("input_ids", "attention_mask", "response_mask", "old_log_probs", "advantages")


@dataclass(frozen=True)
class TokenScores:
    """Per-token results ``(B, R)`` float32, 0 where nothing was asked for. ``entropy`` is None unless asked for."""

    log_probs: Tensor
    entropy: Tensor | None


def score_responses(
    forward: RowForward,
    input_ids: Tensor,
    attention_mask: Tensor,
    token_mask: Tensor,
    *,
    temperature: float,
    with_entropy: bool = False,
) -> TokenScores:
    """Log-probabilities (and entropies) of the response tokens where ``token_mask`` is set; see `RowForward`."""
    outputs = forward(input_ids, attention_mask, token_mask)
    logits = outputs.values / temperature
    labels = input_ids[outputs.row, outputs.column + (input_ids.shape[1] - token_mask.shape[1])]
    log_probs = outputs.place(logprobs_from_logits(logits, labels))
    return TokenScores(log_probs, outputs.place(entropy_from_logits(logits)) if with_entropy else None)


class DataParallelPPOActor(BasePPOActor):
    """Policy over a (sharded) causal language model.

    Args:
        config: the ``actor_rollout_ref.actor`` section.
        model: the policy; gradients are averaged over ranks by FSDP.
        optimizer: None for a policy that only scores.
        use_remove_padding: pack rows, see `RowForward`.
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
        self.forward = RowForward(model, packed=use_remove_padding)
        self.updates = UpdateLoop(
            model,
            device=device,
            batching=update_batching or score_batching,
            mini_batch_size=config.ppo_mini_batch_size,
            epochs=config.ppo_epochs,
            grad_clip=config.grad_clip,
            size_key="actor_rollout_ref.actor.ppo_mini_batch_size",
        )

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False, batching: MicroBatching | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the responses at ``meta_info["temperature"]``, and their entropies if asked for.

        Args:
            data: ``input_ids, attention_mask`` ``(B, P + R)``, ``responses`` ``(B, R)``, optional ``response_mask``.
            batching: instead of ``score_batching``.
        """
        was_training = self.model.training
        self.model.eval()
        batch = tensors_of(data)
        token_mask = response_mask_of(data)
        log_probs = torch.zeros(token_mask.shape, dtype=torch.float32)
        entropys = torch.zeros_like(log_probs) if calculate_entropy else None
        for index in (batching or self.score_batching).split(row_lengths(batch["attention_mask"])):
            scores = score_responses(
                self.forward,
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
        """``ppo_epochs`` passes over the rows in order, one optimizer step per mini-batch; see `UpdateLoop.run`.

        Args:
            data: this rank's rows: ``input_ids, attention_mask, responses, response_mask, old_log_probs, advantages``,
                and ``ref_log_prob`` with ``use_kl_loss``; ``meta_info["temperature"]``. Equal row counts on all ranks.

        Returns:
            Means over the mini-batches of ``actor/{pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower, grad_norm}`` (and
            ``kl_loss, kl_coef``), and ``actor/skipped_steps``: steps left out because the gradient was not finite.
        """
        if self.optimizer is None:
            raise RuntimeError("this policy has no optimizer: it only scores")
        names = [*_UPDATE_COLUMNS, *(["ref_log_prob"] if self.config.use_kl_loss else [])]
        temperature = float(data.meta_info["temperature"])

        def loss(micro: TensorDict, count: BatchCounts) -> tuple[Tensor, dict[str, Tensor]]:
            return self._loss(micro, count, temperature)

        metrics = self.updates.run(data.select(batch_keys=names), self.optimizer, loss)
        metrics = {f"actor/{name}": value for name, value in metrics.items()}
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return metrics

    def _loss(self, micro: TensorDict, count: BatchCounts, temperature: float) -> tuple[Tensor, dict[str, Tensor]]:
        config, mask = self.config, micro["response_mask"]
        scores = score_responses(
            self.forward,
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
