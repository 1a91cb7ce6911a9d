# SPDX-License-Identifier: Apache-2.0
"""What every generation engine does; an engine adds two methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config.worker_sections import RolloutConfig
from verl.utils.model import compute_position_id_with_mask
from verl.workers.rollout.sampling import SamplingParams, resolve_sampling

__all__ = ["BaseRollout", "Generation"]

# Seeds of rows that bring none are drawn from here; 63 bits, so that they are valid int64.
_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Generation:
    """Responses of B rows.

    ``tokens`` ``(B, R)`` int64, right-padded with the pad id; ``lengths`` ``(B,)`` int64, tokens sampled, the first
    end token included; ``log_probs`` ``(B, R)`` float32 of the distribution sampled from, -1 in the padding.
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor


class BaseRollout(ABC):
    """Turns prompts into responses with weights that are handed to it.

    Args:
        config: the ``actor_rollout_ref.rollout`` section.
        eos_token_ids: every id that ends a response.
        pad_token_id: fills prompts on the left and responses on the right.
        seed: for rows that bring no ``sampling_seed``.
    """

    def __init__(
        self, config: RolloutConfig, *, eos_token_ids: Sequence[int], pad_token_id: int, seed: int = 0
    ) -> None:
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.version = -1
        self.seed_generator = torch.Generator().manual_seed(seed)

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights (plain model's names, unsharded) and set `version`.

        Raises:
            RuntimeError: a weight is unknown or missing.
        """

    @abstractmethod
    def release_weights(self) -> None:
        """Give the weights' memory back; the next `update_weights` takes it again, generating before it is an error."""

    @abstractmethod
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, seeds: Tensor, sampling: SamplingParams
    ) -> Generation:
        """Responses to left-padded prompts ``(B, P)``; row i is drawn with ``seeds[i]`` alone. Results on the CPU."""

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses in the columns that training reads.

        Args:
            prompts: ``input_ids``, ``attention_mask`` ``(B, P)`` int64, left-padded; optional ``sampling_seed``
                ``(B,)`` int64. ``meta_info`` may hold ``do_sample, temperature, top_k, top_p, validate``.

        Returns:
            ``prompts`` (B, P), ``responses`` (B, R), ``input_ids``, ``attention_mask``, ``position_ids`` (B, P + R),
            all int64, and ``rollout_log_probs`` (B, R) float32. The response's mask covers the sampled tokens, the
            first end token included; its positions go on by one, past the end token too.
        """
        if prompts.batch is None:
            raise ValueError("generate_sequences needs the tensors input_ids and attention_mask")
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        if not bool(mask.any(dim=1).all()):
            raise ValueError("generate_sequences: a prompt without tokens cannot be continued")
        if "sampling_seed" in prompts.batch:
            seeds = prompts.batch["sampling_seed"]
        else:
            seeds = torch.randint(_MAX_SEED, (ids.shape[0],), generator=self.seed_generator)
        out = self.generate(ids, mask, seeds, resolve_sampling(self.config, prompts.meta_info))
        columns = torch.arange(out.tokens.shape[1])
        positions = compute_position_id_with_mask(mask)
        return DataProto.from_dict(
            {
                "prompts": ids,
                "responses": out.tokens,
                "input_ids": torch.cat([ids, out.tokens], dim=1),
                "attention_mask": torch.cat([mask, (columns < out.lengths[:, None]).to(mask.dtype)], dim=1),
                "position_ids": torch.cat([positions, positions[:, -1:] + 1 + columns], dim=1),
                "rollout_log_probs": out.log_probs,
            }
        )
