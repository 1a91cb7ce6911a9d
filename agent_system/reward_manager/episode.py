# SPDX-License-Identifier: Apache-2.0
"""The episode's reward at the last token of each of its turns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EpisodeRewardManager"]

logger = logging.getLogger(__name__)


class EpisodeRewardManager:
    """Scores rows with `episode_rewards` (whole-episode value, the same on every turn of an episode)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_examine: int, normalize_by_length: bool = False) -> None:
        """
        Args:
            tokenizer: decodes the logged samples.
            num_examine: rows logged per data source and call, at level INFO; nothing else is decoded.
            normalize_by_length: divide the reward by `episode_lengths` (turns).
        """
        self._tokenizer = tokenizer
        self._num_examine = num_examine
        self._normalize_by_length = normalize_by_length

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Reward tensor (B, R) float32, zero except at each row's last response token.

        A row without response tokens stays zero. A column `rm_scores`, when there is one, is returned as it is.
        With `return_dict`, `{"reward_tensor": ..., "reward_extra_info": {}}`.
        """
        batch = data.batch
        assert batch is not None, "the reward manager needs the token columns of the rollout"
        if "rm_scores" in set(batch.keys()):
            reward: torch.Tensor = batch["rm_scores"]
        else:
            reward = self._episode_scores(batch, data.non_tensor_batch)
            self._log_samples(batch, data.non_tensor_batch, reward)
        return {"reward_tensor": reward, "reward_extra_info": {}} if return_dict else reward

    def _episode_scores(self, batch: TensorDict, columns: Mapping[str, np.ndarray]) -> torch.Tensor:
        rows, width = batch["responses"].shape
        lengths = batch["attention_mask"][:, -width:].sum(dim=1)
        scores: np.ndarray = columns["episode_rewards"].astype(np.float32)
        if self._normalize_by_length:
            scores = scores / columns["episode_lengths"].astype(np.float32)
        reward = torch.zeros(rows, width, dtype=torch.float32)
        filled = torch.nonzero(lengths > 0).squeeze(1)
        reward[filled, lengths[filled] - 1] = torch.from_numpy(scores)[filled]
        return reward

    def _log_samples(self, batch: TensorDict, columns: Mapping[str, np.ndarray], reward: torch.Tensor) -> None:
        if self._num_examine <= 0:
            return
        logged: Counter[str] = Counter()
        sources = columns.get("data_source", np.full(len(reward), "text", dtype=object))
        for row, source in enumerate(sources):
            if logged[source] >= self._num_examine:
                continue
            logged[source] += 1
            text = self._tokenizer.decode(batch["input_ids"][row], skip_special_tokens=True)
            logger.info("sample of %s, score %.3f:\n%s", source, reward[row].sum().item(), text)
