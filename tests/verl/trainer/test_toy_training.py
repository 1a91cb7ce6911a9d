# SPDX-License-Identifier: Apache-2.0
"""Real training in this process: TOY game, tiny random model, FSDP2 actor, HF rollout engine."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.trajectory import load_trajectories
from tests.helpers.tiny import make_tiny_model
from tests.helpers.toy_env import TOY_TASKS
from tests.verl.trainer.toy_run import run_toy, toy_config, toy_trainer, weights
from verl.protocol import DataProto
from verl.trainer.ppo import batch_ops, core_algos
from verl.trainer.ppo.ray_trainer import UPDATE_COLUMNS, StepState

EXPECTED = {
    "actor/entropy_loss", "actor/grad_norm", "actor/kl_coef", "actor/kl_loss", "actor/lr", "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower", "actor/pg_loss", "actor/ppo_kl", "actor/skipped_steps",
    *(f"critic/{x}/{how}" for x in ("score", "rewards", "advantages", "returns") for how in ("mean", "max", "min")),
    *(f"{name}/{how}" for name in ("response_length", "prompt_length") for how in ("mean", "max", "min", "clip_ratio")),
    *(f"episode/{name}/{how}" for name in ("reward", "length") for how in ("mean", "max", "min")),
    "episode/success_rate", "episode/tool_call_count/mean", "episode/valid_action_ratio",
    *(f"global_seqlen/{x}" for x in ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean")),
    "perf/total_num_tokens", "perf/time_per_step", "perf/throughput", "perf/cpu_memory_used_gb",
    *(f"timing_s/{x}" for x in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "save_checkpoint")),
    "timing_s/step",
    *(f"timing_per_token_ms/{x}" for x in ("gen", "ref", "adv", "update_actor")),
    *(f"training/rollout_probs_diff_{x}" for x in ("max", "mean", "std")), "training/global_step", "training/epoch",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("toy_model") / "hf")


def learning(line: dict[str, Any]) -> dict[str, Any]:
    """A logged line without wall times and machine state."""
    return {k: v for k, v in line.items() if not k.startswith(("timing", "perf"))}


def test_two_steps_log_everything_and_write_their_files(model: Path, tmp_path: Path) -> None:
    config = toy_config(
        model, tmp_path / "run", "trainer.total_epochs=2", "trainer.save_freq=2", "trainer.test_freq=2",
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.ppo_mini_batch_size=1024",
        f"trainer.rollout_data_dir={tmp_path}/dump",
    )  # fmt: skip
    trainer, lines = run_toy(config)
    assert [line["step"] for line in lines] == [1, 2]
    missing = EXPECTED - set(lines[1])
    assert not missing, sorted(missing)
    assert all(math.isfinite(v) for line in lines for v in line.values()), lines
    assert lines[1]["val/success_rate"] >= 0.0 and "val/success_rate" not in lines[0]
    assert lines[0]["training/rollout_probs_diff_max"] < 1e-5
    assert lines[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and lines[1]["actor/kl_loss"] > 0.0
    episodes, report = load_trajectories(tmp_path / "dump" / "trajectories" / "step_1.jsonl")
    assert not report.bad and len(episodes) == lines[0]["episode/count"]
    rows = (tmp_path / "dump" / "1.jsonl").read_text().splitlines()
    assert len(rows) == sum(len(episode.steps) for episode in episodes) == lines[0]["rollout/num_rows"]
    record = json.loads((tmp_path / "run" / "validation" / "step_2.json").read_text())
    assert record["step"] == 2 and record["num_episodes"] == 1
    folder = trainer.store.folder(2)
    assert {path.name for path in folder.iterdir()} == {"actor", "trainer_state.json"}


@pytest.mark.parametrize(
    "algorithm",
    [
        ("actor_rollout_ref.actor.use_kl_loss=True",),
        (
            "algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "critic.optim.lr=1e-3", "critic.strategy=fsdp2",
            "critic.optim.warmup_style=cosine", "algorithm.filter_groups.enable=True",
        ),
    ],
    ids=["grpo", "gae_filtered"],
)  # fmt: skip
def test_resume_equals_the_straight_run(model: Path, tmp_path: Path, algorithm: tuple[str, ...]) -> None:
    common = ("trainer.save_freq=2", "data.train_batch_size=2", f"critic.model.path={model}", *algorithm)
    straight, lines = run_toy(toy_config(model, tmp_path / "a", *common, "trainer.total_epochs=4"), tasks=TOY_TASKS)
    # The schedule depends on the planned length, so the first part plans four steps too and is cut off.
    first = toy_trainer(toy_config(model, tmp_path / "b", *common, "trainer.total_epochs=4"), tasks=TOY_TASKS)
    first.init_workers()
    first.total_steps = 2
    first.fit()
    torch.manual_seed(12345)
    np.random.seed(12345)
    second, resumed = run_toy(toy_config(model, tmp_path / "b", *common, "trainer.total_epochs=4"), tasks=TOY_TASKS)
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for one, other in zip(lines, resumed, strict=True):
        assert learning(one) == learning(other)
    assert second.train_envs.state_dict() == straight.train_envs.state_dict()
    left, right = weights(straight, tmp_path / "wa"), weights(second, tmp_path / "wb")
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def rollout_rows(trainer: Any) -> DataProto:
    """One step's rows, ready for an update."""
    state = StepState(1)
    for phase in (
        trainer.collect_rollout,
        trainer.prepare_batch,
        trainer.compute_old_log_prob,
        trainer.compute_reward,
        trainer.compute_advantages,
    ):
        phase(state)
    rows = state.batch.select(batch_keys=list(UPDATE_COLUMNS), non_tensor_batch_keys=[])
    rows.meta_info = {"temperature": 1.0}
    return rows


def test_padding_rows_change_nothing(model: Path, tmp_path: Path) -> None:
    results = []
    for name in ("plain", "padded"):
        trainer = toy_trainer(toy_config(model, tmp_path / name))
        trainer.init_workers()
        rows = rollout_rows(trainer)
        if name == "padded":
            rows, added = batch_ops.pad_with_masked_rows(rows, len(rows) + 40)
            assert added == 40
        metrics = trainer.actor_rollout_wg.update_actor(rows).meta_info["metrics"]
        results.append((metrics, weights(trainer, tmp_path / f"{name}_hf")))
    (plain, left), (padded, right) = results
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
        assert plain[name] == pytest.approx(padded[name], abs=1e-5), name
    start = weights_of(model)
    assert max((left[name] - start[name]).abs().max().item() for name in left) > 1e-3
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=2e-5, rtol=0)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture
def random_advantages() -> Iterator[str]:
    """An estimator that knows nothing: one normal draw per row."""
    generator = torch.Generator().manual_seed(0)

    def draw(batch: DataProto, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mask = batch.batch["response_mask"]
        advantages = torch.randn(len(mask), 1, generator=generator) * mask
        return advantages, advantages.clone()

    core_algos.register_adv_est("test_random")(draw)
    yield "test_random"
    del core_algos.ADV_ESTIMATOR_REGISTRY["test_random"]


def success(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean success of the first two steps and of the last five."""
    rates = [line["episode/success_rate"] for line in lines]
    return float(np.mean(rates[:2])), float(np.mean(rates[-5:]))


def test_grpo_learns_the_toy_game(model: Path, tmp_path: Path) -> None:
    _, lines = run_toy(toy_config(model, tmp_path, "trainer.total_epochs=40"))
    before, after = success(lines)
    assert before < 0.4 and after > 0.8, (before, after)


def test_random_advantages_do_not_learn(model: Path, tmp_path: Path, random_advantages: str) -> None:
    config = toy_config(model, tmp_path, "trainer.total_epochs=40", f"algorithm.adv_estimator={random_advantages}")
    before, after = success(run_toy(config)[1])
    assert before < 0.4 and after < 0.6, (before, after)


PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.helpers.toy_env import TOY_TASKS
from tests.verl.trainer.toy_run import run_toy, toy_config, toy_trainer, weights
from verl.trainer.ppo.recipes import TrainerHook

class Killer(TrainerHook):
    name = "killer"

    def epoch_end(self, ctx, epoch):
        if where == f"epoch_end {epoch}":
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, path):
        if where == f"save {self.steps}":
            os.kill(os.getpid(), signal.SIGKILL)

model, out, where = sys.argv[1:4]
config = toy_config(
    Path(model), Path(out), "trainer.save_freq=1", "trainer.total_epochs=4", "data.train_batch_size=2",
    "trainer.max_actor_ckpt_to_keep=1",
)
trainer = toy_trainer(config, tasks=TOY_TASKS)
hook = Killer(config)
type(hook).steps = property(lambda self: trainer.global_step)
trainer.hooks = (hook,)
trainer.init_workers()
trainer.fit()
weights(trainer, Path(out) / "hf")
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["epoch_end 3", "save 3"])
def test_killed_run_resumes_to_the_same_weights(model: Path, tmp_path: Path, where: str) -> None:
    root = Path(__file__).resolve().parents[3]

    def run(out: Path, kill: str) -> int:
        command = [sys.executable, "-c", PROGRAM, str(model), str(out), kill]
        return subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, timeout=600).returncode

    assert run(tmp_path / "straight", "never") == 0
    assert run(tmp_path / "killed", where) == -signal.SIGKILL
    assert (tmp_path / "killed" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert run(tmp_path / "killed", "never") == 0
    left, right = weights_of(tmp_path / "straight" / "hf"), weights_of(tmp_path / "killed" / "hf")
    assert all(torch.equal(left[name], right[name]) for name in left)
    straight, killed = (
        {line["step"]: learning(line) for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())}
        for name in ("straight", "killed")
    )
    assert straight == killed
    folders = sorted(path.name for path in (tmp_path / "killed").glob("global_step_*"))
    assert folders == ["global_step_4"]
