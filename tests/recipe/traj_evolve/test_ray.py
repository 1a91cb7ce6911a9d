# SPDX-License-Identifier: Apache-2.0
"""The program on Ray: two ranks of co-located policy, reference and discriminator, from the entry's `run_ppo`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from agent_system.environments import registry
from tests.recipe.traj_evolve.support import MODULE, logged, register_toy_adapter
from tests.recipe.traj_evolve.test_online import EVERY_STEP, UPDATES
from tests.verl.trainer.toy_run import RED, toy_envs, toy_overrides
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import run_ppo

ray = pytest.importorskip("ray")


def make_coded_manager(config: Any, is_train: bool) -> Any:
    """Entry point of the registry: TOY in which any text is a command, played in the driver's process."""
    return toy_envs(config, train=is_train, tasks=RED)


@pytest.mark.slow
def test_two_ranks_on_ray_equal_one(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests register TOY with the manager that wants tagged actions.
    monkeypatch.setitem(registry._ENTRY_POINTS, "toy", "tests.recipe.traj_evolve.test_ray:make_coded_manager")
    register_toy_adapter()
    lines = {}
    for ranks in (1, 2):
        given = [
            *toy_overrides(tiny_model_dir, tmp_path / str(ranks)), "env.env_name=toy",
            f"trainer.n_gpus_per_node={ranks}", f"traj_evolve.discriminator_model_path={discriminator_dir}",
            "traj_evolve.evolve_freq=1", "trainer.total_epochs=2", "trainer.save_freq=2",
        ]  # fmt: skip
        run_ppo(load_config("traj_evolve_trainer", given, "recipe.traj_evolve.config"), (MODULE,))
        lines[ranks] = logged(tmp_path / str(ranks))
        assert [line["step"] for line in lines[ranks]] == [1, 2]
        assert all(set(line) >= EVERY_STEP | UPDATES for line in lines[ranks])
        assert all(math.isfinite(value) for line in lines[ranks] for value in line.values())
    one, two = lines[1][0], lines[2][0]
    for name in EVERY_STEP | UPDATES | {"actor/grad_norm", "episode/reward/mean"}:
        if not name.startswith("timing"):
            assert one[name] == pytest.approx(two[name], abs=1e-3), name
    saved = {path.name for path in (tmp_path / "2/global_step_2/hooks/traj_evolve/discriminator").glob("*.pt")}
    assert saved == {f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim") for rank in (0, 1)}
    # Resumed at the end: everything is found and nothing is left to do.
    run_ppo(load_config("traj_evolve_trainer", given, "recipe.traj_evolve.config"), (MODULE,))
    assert len(logged(tmp_path / "2")) == 2
