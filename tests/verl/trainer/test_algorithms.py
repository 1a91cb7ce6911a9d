# SPDX-License-Identifier: Apache-2.0
"""Every algorithm: two real training steps on generated ALFWorld games with a tiny policy, on the CPU.

Most run with one rank inside this process; one goes through `run_ppo` on Ray with two ranks, one through the command
line.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.verl.trainer.alfworld_run import alfworld_overrides, changed_by, exported_weights, logged, model_weights
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import build_trainer, check_inputs, read_config, run_ppo
from verl.trainer.ppo.worker_groups import local_worker_groups

REPO_ROOT = Path(__file__).resolve().parents[3]
A, C = "actor_rollout_ref.actor", "critic"


@dataclass(frozen=True)
class Case:
    """`logged`: metrics that only this algorithm has, or that must not be 0."""

    overrides: tuple[str, ...]
    logged: tuple[str, ...] = ()
    mode: str = "here"


VALUES = (
    f"{C}.ppo_micro_batch_size_per_gpu=16", f"{C}.ppo_mini_batch_size=32", f"{C}.strategy=fsdp2", f"{C}.optim.lr=1e-3",
    f"{C}.model.enable_gradient_checkpointing=False",
)  # fmt: skip
REFERENCE = (f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=low_var_kl")

CASES = {
    "gae": Case(
        ("algorithm.adv_estimator=gae", "algorithm.lam=0.95", *VALUES, "trainer.n_gpus_per_node=2"),
        ("critic/vf_loss", "critic/grad_norm", "critic/values/max", "critic/vf_explained_var"),
        "ray",
    ),
    "gae_pf_ppo": Case(
        ("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True", "trainer.critic_warmup=2", *VALUES),
        ("critic/vf_loss",),
    ),
    "grpo": Case(("algorithm.adv_estimator=grpo", *REFERENCE, f"{A}.entropy_coeff=0.001"), ("actor/kl_loss",)),
    "grpo_passk": Case(("algorithm.adv_estimator=grpo_passk", "algorithm.compute_mean_std_cross_steps=False")),
    "rloo": Case(
        ("algorithm.adv_estimator=rloo", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"),
        ("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"),
    ),
    "reinforce_plus_plus": Case(("algorithm.adv_estimator=reinforce_plus_plus",)),
    "reinforce_plus_plus_baseline": Case(("algorithm.adv_estimator=reinforce_plus_plus_baseline",)),
    "gigpo": Case(
        ("algorithm.adv_estimator=gigpo", "algorithm.gamma=0.95", "algorithm.gigpo.mode=mean_std_norm"),
        mode="command",
    ),
    "gigpo_similar_dynamic": Case(
        ("algorithm.adv_estimator=gigpo", "algorithm.gigpo.enable_similarity=True",
         "algorithm.gigpo.similarity_thresh=0.9", "algorithm.filter_groups.enable=True"),
        ("dynamic_sampling/groups_kept",),
    ),
    "hgpo": Case(("algorithm.adv_estimator=hgpo", "algorithm.hgpo.base_group=True")),
    "dapo": Case(
        ("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", f"{A}.clip_ratio_high=0.28",
         "algorithm.filter_groups.max_num_gen_batches=0"),
        ("dynamic_sampling/groups_kept", "dynamic_sampling/groups_trained"),
    ),
    "gspo": Case(
        ("algorithm.adv_estimator=grpo", f"{A}.policy_loss.loss_mode=gspo", f"{A}.clip_ratio_low=3e-4",
         f"{A}.clip_ratio_high=4e-4"),
    ),
    "lora": Case(
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8",
         *REFERENCE),
        ("actor/kl_loss",),
    ),
}  # fmt: skip


def run_here(given: Sequence[str]) -> None:
    """The program's own steps with one rank in this process instead of Ray."""
    from agent_system.environments import make_envs

    config, recipes = read_config(load_config("ppo_trainer", given))
    check_inputs(config)
    train_envs, val_envs = make_envs(config)
    trainer = build_trainer(
        config, recipes, device="cpu", make_worker_groups=local_worker_groups, train_envs=train_envs, val_envs=val_envs
    )
    trainer.init_workers()
    trainer.fit()
    train_envs.close()
    val_envs.close()


def run_command(given: Sequence[str], folder: Path) -> None:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given]
    env = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


def check(case: Case, model: Path, out: Path) -> None:
    lines = logged(out)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        odd = {name: value for name, value in line.items() if value is None or not math.isfinite(value)}
        assert not odd
    for name in case.logged:
        assert any(line[name] != 0.0 for line in lines), name
    assert lines[-1]["actor/grad_norm"] > 0.0 and lines[-1]["critic/advantages/max"] > 0.0
    # The episodes have something to compare: some end with a reward, some do not.
    rewards = [line["episode/reward/max"] for line in lines], [line["episode/reward/min"] for line in lines]
    assert max(rewards[0]) == 10.0 and min(rewards[1]) == 0.0
    assert changed_by(model_weights(model), exported_weights(out, 2)) > 1e-5


@pytest.mark.parametrize("name", CASES)
def test_two_steps(
    name: str, games_and_policy: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    games, model = games_and_policy
    out = tmp_path / "run"
    given = [*alfworld_overrides(games, model, out), *case.overrides]
    if case.mode == "command":
        run_command(given, tmp_path)
    elif case.mode == "ray":
        request.getfixturevalue("ray_session")
        run_ppo(load_config("ppo_trainer", given))
    else:
        run_here(given)
    check(case, model, out)
