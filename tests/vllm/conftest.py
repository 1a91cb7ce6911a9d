# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU, one of each kind for the whole session: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import make_tiny_model
from verl.utils.import_utils import is_installed

KINDS: dict[str, dict[str, Any]] = {"tied": {}, "untied": {}, "lora": {"lora_rank": 4, "lora_alpha": 16}}


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a model with tied embeddings and one without; heads of 32 numbers, the least that vLLM takes here."""
    root = tmp_path_factory.mktemp("vllm")
    return {
        name: make_tiny_model(root / name / "hf", num_heads=2, num_kv_heads=1, tie_word_embeddings=name == "tied")
        for name in ("tied", "untied")
    }


@pytest.fixture(scope="session")
def make_policy(model_dirs: dict[str, Path]) -> Callable[[str], Any]:
    """`make_policy(kind)`: a worker group of one rank whose engine is vLLM; one group per kind."""
    from tests.verl.workers.support import make_group, worker_config
    from verl.trainer.config.worker_sections import EngineKwargsConfig

    made: dict[str, Any] = {}

    def make(kind: str) -> Any:
        if kind not in made:
            config = worker_config(
                model_dirs["untied" if kind == "untied" else "tied"],
                model=KINDS[kind],
                # Blocks so small that the prompts fill some: the cache of prompts takes part.
                rollout={
                    "name": "vllm",
                    "tensor_model_parallel_size": 1,
                    "engine_kwargs": EngineKwargsConfig(vllm={"swap_space": None, "block_size": 32}),
                },
            )
            made[kind] = make_group(config)
        return made[kind]

    return make


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm() -> None:
    if not is_installed("vllm"):
        pytest.skip("vLLM is not installed here: bash tests/run.sh --vllm")
