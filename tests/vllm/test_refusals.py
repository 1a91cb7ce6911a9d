# SPDX-License-Identifier: Apache-2.0
"""What vLLM cannot do is said in one sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.tiny import make_tiny_model
from tests.verl.workers.support import make_group, worker_config
from verl.trainer.config.worker_sections import EngineKwargsConfig
from verl.utils.errors import UserError

pytestmark = pytest.mark.vllm


def refusal(path: Path, **rollout: Any) -> str:
    given = {"name": "vllm", "tensor_model_parallel_size": 1} | rollout
    with pytest.raises(UserError) as caught:
        make_group(worker_config(path, rollout=given))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_small_heads(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "small")
    assert "at least 32 numbers" in refusal(path) and "rollout.name=hf" in refusal(path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"swap_space": 4}, "engine_kwargs.vllm.swap_space is no engine argument of vLLM"),
        ({"block_sise": 32}, "did you mean block_size?"),
        ({"tensor_parallel_size": 2}, "engine_kwargs.vllm.tensor_parallel_size is set by this program"),
        ({"dtype": "bfloat16"}, "engine_kwargs.vllm.dtype is set by this program"),
        ({"max_model_len": 20}, "engine_kwargs.vllm.max_model_len is set by this program"),
        ({"pipeline_parallel_size": 2}, "engine_kwargs.vllm.pipeline_parallel_size is set by this program"),
        ({"kv_cache_dtype": "nonsense"}, "refuses the settings"),
    ],
)
def test_engine_arguments(model_dirs: dict[str, Path], arguments: dict[str, Any], expected: str) -> None:
    assert expected in refusal(model_dirs["tied"], engine_kwargs=EngineKwargsConfig(vllm=arguments))


def test_what_vllm_itself_refuses(model_dirs: dict[str, Path]) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()
    text = refusal(model_dirs["tied"], max_num_seqs=100, max_num_batched_tokens=64)
    assert "refuses the settings" in text and "max_num_batched_tokens" in text
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.random.get_rng_state(), before[2])
