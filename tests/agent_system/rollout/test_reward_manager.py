# SPDX-License-Identifier: Apache-2.0
"""Episode reward at the last response token."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.reward_manager import EpisodeRewardManager
from tests.helpers.tiny import make_tiny_tokenizer
from verl.protocol import DataProto


def rows(**extra: torch.Tensor) -> DataProto:
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    tensors = {"responses": torch.zeros(3, 4, dtype=torch.int64), "attention_mask": mask, **extra}
    tensors["input_ids"] = torch.full((3, 6), 65)
    columns = {
        "episode_rewards": np.array([10.0, -1.0, 7.0], dtype=object),
        "episode_lengths": np.array([5.0, 2.0, 1.0], dtype=object),
        "data_source": np.array(["a", "a", "b"], dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_reward_sits_on_the_last_token() -> None:
    manager = EpisodeRewardManager(None, num_examine=0)  # type: ignore[arg-type]
    expected = torch.tensor([[0.0, 10, 0, 0], [0, 0, 0, -1], [0, 0, 0, 0]])
    result = manager(rows())
    assert torch.equal(result, expected) and result.dtype == torch.float32
    assert manager(rows(), return_dict=True)["reward_extra_info"] == {}
    by_length = EpisodeRewardManager(None, 0, normalize_by_length=True)(rows())  # type: ignore[arg-type]
    assert torch.equal(by_length, torch.tensor([[0.0, 2, 0, 0], [0, 0, 0, -0.5], [0, 0, 0, 0]]))


def test_model_scores_win() -> None:
    scores = torch.arange(12.0).reshape(3, 4)
    manager = EpisodeRewardManager(None, num_examine=0)  # type: ignore[arg-type]
    assert torch.equal(manager(rows(rm_scores=scores), return_dict=True)["reward_tensor"], scores)


def test_samples_are_logged_per_data_source(caplog: pytest.LogCaptureFixture) -> None:
    class Counting:
        calls = 0

        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            self.calls += 1
            return make_tiny_tokenizer().decode(ids)

    tokenizer = Counting()
    with caplog.at_level(logging.INFO):
        EpisodeRewardManager(tokenizer, num_examine=1)(rows())  # type: ignore[arg-type]
    assert tokenizer.calls == 2 and len(caplog.records) == 2
