# SPDX-License-Identifier: Apache-2.0
"""One small generated shop for the tests of this folder, and configurations that play in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

WebshopConfigMaker = Callable[..., Any]


@pytest.fixture(scope="session")
def shop_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never write into it."""
    from agent_system.environments.env_package.webshop.generate import generate_catalogue

    return generate_catalogue(tmp_path_factory.mktemp("shop") / "shop", products=80, goals=160, seed=3)


@pytest.fixture(scope="session")
def make_config(shop_dir: Path) -> WebshopConfigMaker:
    """Keys of `env.webshop` as keyword arguments; `train`, `val`, `n`, `history`, `seed` besides."""

    def make(**changes: Any) -> Any:
        run = {"train": 3, "val": 4, "n": 2, "history": 2, "seed": 0, "workers": 0}
        section = {
            "use_small": True,
            "human_goals": False,
            "data_dir": str(shop_dir),
            "source": "data",
            "generated": None,
            "split": None,
            "legacy_goal_order": False,
            "val_goals": None,
            "option_match": "upstream",
            "observation_mode": "text",
            "prompt_style": "full",
        }
        for name, value in changes.items():
            (run if name in run else section)[name] = value
        env = SimpleNamespace(
            env_name="Webshop",
            seed=run["seed"],
            history_length=run["history"],
            num_workers=run["workers"],
            worker_timeout=300.0,
            resources_per_worker=SimpleNamespace(num_cpus=0.1, num_gpus=0.0),
            rollout=SimpleNamespace(n=run["n"]),
            webshop=SimpleNamespace(**section),
        )
        return SimpleNamespace(env=env, data=SimpleNamespace(train_batch_size=run["train"], val_batch_size=run["val"]))

    return make
