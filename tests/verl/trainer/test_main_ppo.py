# SPDX-License-Identifier: Apache-2.0
"""The entry program: what is refused before a model is loaded, the length of a run, Ray's share of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import ray

from tests.helpers.toy_env import register_toy
from verl.trainer import main_ppo
from verl.trainer.config.schema import DataConfig, PPOConfig, build_config, load_config
from verl.trainer.ppo import ray_setup
from verl.utils.errors import UserError

RUNS_HERE = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.logger=[console]",
)


@pytest.mark.parametrize(
    "override,pattern",
    [
        ("algorithm.adv_estimator=grpoo", "algorithm.adv_estimator='grpoo'.*known:.*grpo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=other", "loss_mode='other'.*vanilla"),
        ("algorithm.recipe_modules=[recipe.not_there]", "recipe.not_there"),
    ],
)
def test_bad_names_are_refused_first(override: str, pattern: str) -> None:
    with pytest.raises(UserError, match=pattern):
        main_ppo.read_config(load_config("ppo_trainer", [*RUNS_HERE, override]))


def test_keys_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    main_ppo.read_config(load_config("ppo_trainer", RUNS_HERE))
    assert not caplog.records
    main_ppo.read_config(load_config("ppo_trainer", [*RUNS_HERE, "trainer.validation_data_dir=out"]))
    assert "read by no part of this version: trainer.validation_data_dir" in caplog.text


def test_program_prints_one_line_and_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *RUNS_HERE, f"env.alfworld.data_dir={tmp_path}/none"]
    env = os.environ | {"PYTHONPATH": str(Path(main_ppo.__file__).parents[2])}
    started = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    elapsed = time.monotonic() - started
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "ALFWORLD_DATA" in errors[0] and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert elapsed < 60


def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    register_toy()
    cfg = load_config("ppo_trainer", [*RUNS_HERE, "env.env_name=toy", f"actor_rollout_ref.model.path={tmp_path}/gone"])
    with pytest.raises(UserError, match=r"actor_rollout_ref.model.path.*gone"):
        main_ppo.run_ppo(cfg)


def test_steps_of_an_epoch(tmp_path: Path) -> None:
    assert main_ppo.steps_per_epoch(DataConfig(train_batch_size=8)) == 1
    path = tmp_path / "train.parquet"
    pd.DataFrame({"prompt": ["x"] * 20}).to_parquet(path)
    assert main_ppo.steps_per_epoch(DataConfig(train_batch_size=8, train_files=str(path))) == 2
    assert main_ppo.steps_per_epoch(DataConfig(train_batch_size=8, train_files=(str(path), str(path)))) == 5
    with pytest.raises(UserError, match=r"20 rows, fewer than data.train_batch_size=21"):
        main_ppo.steps_per_epoch(DataConfig(train_batch_size=21, train_files=str(path)))
    with pytest.raises(UserError, match=r"data.train_files"):
        main_ppo.steps_per_epoch(DataConfig(train_batch_size=8, train_files=str(tmp_path / "gone.parquet")))
    (tmp_path / "text.parquet").write_text("not parquet at all")
    with pytest.raises(UserError, match="not a parquet file"):
        main_ppo.steps_per_epoch(DataConfig(train_batch_size=8, train_files=str(tmp_path / "text.parquet")))


def config(*overrides: str) -> PPOConfig:
    return build_config(PPOConfig, load_config("ppo_trainer", [*RUNS_HERE, *overrides]))


def test_demand_and_its_check_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test's Ray may be up in this process; here none is.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    wanted = ray_setup.demand(config("trainer.n_gpus_per_node=2"), "cpu", num_env_workers=4)
    assert wanted.cpus == pytest.approx(2.4) and wanted.gpus == 0
    assert ray_setup.demand(config("trainer.n_gpus_per_node=2"), "cuda", 4).gpus == 2
    with pytest.raises(UserError, match=r"ray_init.num_cpus=1; set it to 3 or to null"):
        ray_setup.start_ray(config("ray_init.num_cpus=1", "ray_init.num_gpus=0"), wanted)
    with pytest.raises(UserError, match=r"asks for 9 GPUs.*n_gpus_per_node=9.*shows 0"):
        ray_setup.start_ray(config("ray_init.num_gpus=0", "trainer.n_gpus_per_node=9"), ray_setup.Demand(9.0, 9))


def test_shell_variables_win_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    env = ray_setup.get_ppo_ray_runtime_env()["env_vars"]
    assert "NCCL_DEBUG" not in env and env["TOKENIZERS_PARALLELISM"] == "true"
