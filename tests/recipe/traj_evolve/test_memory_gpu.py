# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the discriminator rests in host memory, and the peak is not higher than GRPO's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny import make_tiny_model
from tests.recipe.traj_evolve.support import evolve_trainer, make_discriminator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# About 14 M parameters: large enough that weights, not workspaces, decide the peak.
SIZE: dict[str, Any] = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "intermediate_size": 1536}


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_peak_is_not_above_grpo(tmp_path: Path, strategy: str) -> None:
    model = make_tiny_model(tmp_path / "policy", **SIZE)
    discriminator = make_discriminator(tmp_path / "discriminator", **SIZE)
    given = [
        "trainer.device=cuda", "trainer.total_epochs=3", f"actor_rollout_ref.actor.strategy={strategy}",
        f"traj_evolve.discriminator_model_path={discriminator}", "traj_evolve.evolve_freq=1",
        "trainer.save_freq=2", "traj_evolve.score_batch_size=2", "traj_evolve.micro_batch_size_per_gpu=2",
    ]  # fmt: skip
    peaks = {}
    for name in ("grpo", "traj_evolve"):
        switch = f"traj_evolve.enable={name == 'traj_evolve'}"
        trainer = evolve_trainer(model, tmp_path / name, *given, switch, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        trainer.fit()
        peaks[name] = torch.cuda.max_memory_allocated()
        if name == "traj_evolve":
            group: Any = trainer.worker_groups["discriminator"]
            assert group.placement() == [{"parameters": "cpu", "optimizer": "cpu"}]
            assert {"rest", "score", "update"} <= set(group.device_memory()[0])
        del trainer
        torch.cuda.empty_cache()
    assert peaks["traj_evolve"] <= peaks["grpo"] * 1.02, peaks
