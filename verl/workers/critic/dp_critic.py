# SPDX-License-Identifier: Apache-2.0
"""Data-parallel value model: values of responses, and updates by `verl.workers.updates`."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.protocol import DataProto
from verl.trainer.config.worker_sections import CriticConfig
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.core_algos import agg_loss, compute_value_loss_tokens
from verl.utils.fsdp_utils import reshard
from verl.workers.batching import MicroBatching, row_lengths
from verl.workers.critic.base import BasePPOCritic
from verl.workers.forward import RowForward
from verl.workers.updates import BatchCounts, UpdateLoop, response_mask_of

__all__ = ["DataParallelPPOCritic"]

_UPDATE_COLUMNS = ("input_ids", "attention_mask", "response_mask", "values", "returns")


class DataParallelPPOCritic(BasePPOCritic):
    """Value model over a (sharded) token classifier with one label.

    The value of a response token is the head's output at the token before it: what was known when it was sampled.

    Args:
        config: the ``critic`` section.
        model: gradients are averaged over ranks by FSDP.
    """

    def __init__(self, config: CriticConfig, model: nn.Module, optimizer: Optimizer, *, device: torch.device) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.score_batching = MicroBatching.of(
            config.forward_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.forward_max_token_len_per_gpu
        )
        self.forward = RowForward(model, packed=config.model.use_remove_padding)
        self.updates = UpdateLoop(
            model,
            device=device,
            batching=MicroBatching.of(
                config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu
            ),
            mini_batch_size=config.ppo_mini_batch_size,
            epochs=config.ppo_epochs,
            grad_clip=config.grad_clip,
            size_key="critic.ppo_mini_batch_size",
        )

    @torch.no_grad()
    def compute_values(self, data: DataProto) -> Tensor:
        """Values of the response tokens.

        Args:
            data: ``input_ids, attention_mask`` ``(B, P + R)``, ``responses`` ``(B, R)``, optional ``response_mask``.
        """
        was_training = self.model.training
        self.model.eval()
        batch, token_mask = tensors_of(data), response_mask_of(data)
        values = torch.zeros(token_mask.shape, dtype=torch.float32)
        for index in self.score_batching.split(row_lengths(batch["attention_mask"])):
            columns = (batch["input_ids"][index], batch["attention_mask"][index], token_mask[index])
            values[index] = self._values(*(column.to(self.device) for column in columns)).cpu()
        # As in `DataParallelPPOActor.compute_log_prob`: no backward pass follows that would free gathered weights.
        reshard(self.model)
        self.model.train(was_training)
        return values

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """``ppo_epochs`` passes over the rows in order, one optimizer step per mini-batch; see `UpdateLoop.run`.

        Args:
            data: this rank's rows: ``input_ids, attention_mask, response_mask``, ``values`` and ``returns``
                ``(B, R)``. Equal row counts on all ranks.

        Returns:
            Means over the mini-batches of ``critic/{vf_loss, vf_clipfrac, vpred_mean, grad_norm}``, and
            ``critic/skipped_steps``: steps left out because the gradient was not finite.
        """
        metrics = self.updates.run(data.select(batch_keys=list(_UPDATE_COLUMNS)), self.optimizer, self._loss)
        return {f"critic/{name}": value for name, value in metrics.items()}

    def _values(self, input_ids: Tensor, attention_mask: Tensor, token_mask: Tensor) -> Tensor:
        outputs = self.forward(input_ids, attention_mask, token_mask)
        return outputs.place(outputs.values[:, 0])

    def _loss(self, micro: TensorDict, count: BatchCounts) -> tuple[Tensor, dict[str, Tensor]]:
        mask = micro["response_mask"]
        values = self._values(micro["input_ids"], micro["attention_mask"], mask)
        out = compute_value_loss_tokens(values, micro["returns"], micro["values"], mask, self.config.cliprange_value)
        loss = agg_loss(
            out.per_token_loss, mask, self.config.loss_agg_mode, num_tokens=count.tokens, num_rows=count.rows
        )
        parts = {"vf_loss": loss.detach()}
        parts.update({name: value / count.tokens for name, value in out.metrics.items()})
        return loss, parts
