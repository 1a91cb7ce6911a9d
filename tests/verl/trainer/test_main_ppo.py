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


def test_a_warmup_without_critic_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    main_ppo.read_config(load_config("ppo_trainer", [*RUNS_HERE, "trainer.critic_warmup=3"]))
    assert "trainer.critic_warmup=3" in caplog.text and "nothing is learnt" in caplog.text


def test_program_prints_one_line_and_status_2(tmp_path: Path) -> None:
    given = [f"env.alfworld.data_dir={tmp_path}/none", f"actor_rollout_ref.model.path={tmp_path}"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *RUNS_HERE, *given]
    env = os.environ | {"PYTHONPATH": str(Path(main_ppo.__file__).parents[2])}
    started = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    elapsed = time.monotonic() - started
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "ALFWORLD_DATA" in errors[0] and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert elapsed < 60


@pytest.mark.parametrize(
    "overrides,pattern",
    [
        (["actor_rollout_ref.model.path=/nowhere/gone"], r"actor_rollout_ref.model.path=/nowhere/gone"),
        (
            ["algorithm.adv_estimator=gae", "critic.model.path=/nowhere/gone", "critic.ppo_micro_batch_size_per_gpu=4"],
            r"critic.model.path=/nowhere/gone",
        ),
        (["data.train_files=/nowhere/rows.parquet"], r"data.train_files=/nowhere/rows.parquet"),
    ],
)
def test_missing_files_are_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], pattern: str
) -> None:
    def made(config: PPOConfig) -> None:
        raise AssertionError("environments were made first")

    monkeypatch.setattr("agent_system.environments.make_envs", made)
    given = [*RUNS_HERE, f"actor_rollout_ref.model.path={tmp_path}", *overrides]
    with pytest.raises(UserError, match=pattern):
        main_ppo.run_ppo(load_config("ppo_trainer", given))


def test_recipe_modules_reach_every_worker() -> None:
    given = ["actor_rollout_ref.model.external_lib=mine", "algorithm.recipe_modules=[recipe.gigpo]"]
    read, _ = main_ppo.read_config(load_config("ppo_trainer", [*RUNS_HERE, *given]), ("recipe.hgpo",))
    modules = ("mine", "recipe.gigpo", "recipe.hgpo")
    assert read.actor_rollout_ref.model.external_lib == read.critic.model.external_lib == modules


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
    with pytest.raises(UserError, match="cannot be read as a parquet file"):
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


def test_the_cluster_decides_about_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's machine need not have the GPUs."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 2.0})
    assert ray_setup.choose_device(config("trainer.device=cuda")) == "cuda"
    assert ray_setup.choose_device(config("trainer.device=auto", "trainer.n_gpus_per_node=2")) == "cuda"
    assert ray_setup.choose_device(config("trainer.device=auto", "trainer.n_gpus_per_node=4")) == "cpu"
    assert ray_setup.choose_device(config("trainer.device=cpu")) == "cpu"


def test_joining_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []

    def fake_init(**kwargs: object) -> None:
        calls.append(kwargs)
        if kwargs["address"] == "10.0.0.1:6379":
            raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fake_init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not ray_setup.join_cluster(config()) and not ray_setup.join_cluster(config("ray_init.address=local"))
    assert not calls
    assert ray_setup.join_cluster(config("ray_init.address=auto", "ray_init.namespace=n"))
    assert calls[0]["address"] == "auto" and calls[0]["namespace"] == "n"
    with pytest.raises(UserError, match=r"no Ray cluster answers at 10.0.0.1:6379"):
        ray_setup.join_cluster(config("ray_init.address=10.0.0.1:6379"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(UserError, match=r"ray_init.num_cpus=4 is a size.*set ray_init.num_cpus=null"):
        ray_setup.join_cluster(config("ray_init.num_cpus=4"))


def test_names_of_the_program_that_outside_code_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(main_ppo, "run_ppo", ran.append)
    cfg = load_config("ppo_trainer", ["data.seed=3"])
    main_ppo.TaskRunner().run(cfg)
    assert ran == [cfg]
    rows = range(20)
    orders = [list(main_ppo.create_rl_sampler(cfg.data, rows)) for _ in range(2)]
    assert orders[0] == orders[1] != list(rows) and sorted(orders[0]) == list(rows)
    cfg.data.shuffle = False
    assert list(main_ppo.create_rl_sampler(cfg.data, rows)) == list(rows)


def test_shell_variables_win_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    env = ray_setup.get_ppo_ray_runtime_env()["env_vars"]
    assert "NCCL_DEBUG" not in env and env["TOKENIZERS_PARALLELISM"] == "true"
