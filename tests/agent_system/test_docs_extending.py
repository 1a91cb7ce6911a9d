# SPDX-License-Identifier: Apache-2.0
"""docs/extending.md: every block is run, the training commands with a tiny random model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo import registry
from verl.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "extending.md"
FILES = {"number_game.py", "check_number_game.py", "run_number_game.sh", "my_algorithms.py", "short_wins.py",
         "number_credit.py"}  # fmt: skip


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The named blocks as files in `folder`; the others, all of them shell commands, in order."""
    folder = tmp_path_factory.mktemp("extending")
    commands = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S):
        name = re.match(r"# ([\w.]+\.(?:py|sh))\n", block)
        if name:
            (folder / name[1]).write_text(block, encoding="utf-8")
        else:
            assert language == "bash", f"a block without a file name: {block[:60]}"
            commands.append(block)
    return SimpleNamespace(folder=folder, commands=commands)


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(ROOT)])
    bin_folder = str(Path(sys.executable).parent)
    env = os.environ | {"PYTHONPATH": paths, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"} | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_block_is_known(book: SimpleNamespace) -> None:
    assert {path.name for path in book.folder.iterdir()} >= FILES
    assert len(book.commands) == 3


def test_the_environment_keeps_its_contract(book: SimpleNamespace) -> None:
    succeed(run(book.folder, sys.executable, "check_number_game.py"))
    # The check in the document can fail: a projection that raises on some text is found.
    text = (book.folder / "check_number_game.py").read_text()
    (book.folder / "check_bad.py").write_text(text.replace("read_guess, config", "lambda texts: 1 / 0, config"))
    assert run(book.folder, sys.executable, "check_bad.py").returncode == 1


def test_training_with_everything_and_its_credit_analysis(book: SimpleNamespace, tiny_model_dir: Path) -> None:
    succeed(run(book.folder, "bash", "-c", book.commands[1], MODEL=str(tiny_model_dir)))
    out = book.folder / "runs" / "short_wins"
    first, second = metrics(out)
    assert 0.0 < first["short_wins/mean_factor"] <= 1.0 and "val/success_rate" in second
    assert {"actor/pg_loss", "actor/ppo_kl"} <= set(first)
    assert json.loads((out / "validation" / "step_2.json").read_text())["split"] == "held_out"
    state = json.loads((out / "global_step_2" / "trainer_state.json").read_text())
    assert state["hooks"]["short_wins"] == {"wins": second["short_wins/wins"]}
    assert "trajectories labelled" in succeed(run(book.folder, "bash", "-c", book.commands[2]))
    header = json.loads((book.folder / "runs" / "credit" / "credit_analysis.json").read_text())["header"]
    assert header["env_names"] == ["number_game"] and header["counts"]["trajectories"] == 8


@pytest.mark.slow
def test_the_other_two_commands(book: SimpleNamespace, tiny_model_dir: Path) -> None:
    succeed(run(book.folder, "bash", "run_number_game.sh", MODEL=str(tiny_model_dir)))
    assert len(metrics(book.folder / "runs" / "number_game")) == 2
    succeed(run(book.folder, "bash", "-c", book.commands[0], MODEL=str(tiny_model_dir)))
    assert len(metrics(book.folder / "runs" / "own_algorithm")) == 2


def test_a_wrong_weight_is_refused_before_a_model_is_loaded(book: SimpleNamespace) -> None:
    command = book.commands[1].replace("weight=0.2", "weight=1.0")
    done = run(book.folder, "bash", "-c", command, MODEL=str(book.folder / "no_model"))
    assert done.returncode == 2 and done.stderr.count("error:") == 1 and "below 1" in done.stderr


def test_an_environment_in_external_lib_is_not_found(
    book: SimpleNamespace, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(book.folder))
    overrides = [
        "actor_rollout_ref.model.external_lib=number_game", "env.env_name=number_game", "trainer.device=cpu",
        "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"trainer.default_local_dir={tmp_path / 'run'}", f"actor_rollout_ref.model.path={tiny_model_dir}",
    ]  # fmt: skip
    with pytest.raises(UserError, match="number_game: no such environment"):
        run_ppo(load_config("ppo_trainer", overrides))


def test_numbers_of_estimator_and_loss(book: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(book.folder))
    monkeypatch.setattr(registry, "ADV_ESTIMATOR_REGISTRY", dict(registry.ADV_ESTIMATOR_REGISTRY))
    monkeypatch.setattr(registry, "POLICY_LOSS_REGISTRY", dict(registry.POLICY_LOSS_REGISTRY))
    try:
        import my_algorithms  # noqa: F401
    finally:
        sys.modules.pop("my_algorithms", None)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    batch = DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_rewards": rewards},
        non_tensors={"uid": np.array(["g"] * 3, dtype=object), "traj_uid": np.array(["a", "b", "a"], dtype=object)},
    )
    estimator = registry.get_adv_estimator("sign_of_grpo")
    algorithm: Any = SimpleNamespace(singleton_advantage="reference")
    advantages, _ = estimator(batch, algorithm)
    assert advantages.tolist() == [[1.0, 1.0], [-1.0, 0.0], [1.0, 1.0]]
    old = torch.zeros(1, 2)
    new = torch.tensor([[0.0, 0.5]], requires_grad=True)
    actor: Any = SimpleNamespace(clip_ratio=0.2)
    output = registry.get_policy_loss("squared_ratio")(old, new, torch.ones(1, 2), torch.tensor([[1, 1]]), actor)
    ratio = float(np.exp(0.5))
    assert output.per_token_loss[0].tolist() == pytest.approx([-1.0, -ratio + (ratio - 1) ** 2 / 0.4])
    assert output.metrics["ppo_kl"].item() == pytest.approx(-0.5)


SCRIPTED = """
from agent_system.step_discriminator.trajectory_analyzer import get_adapter, label_trajectories
from agent_system.trajectory import Step, Trajectory
import number_credit

def step(index, action):
    return Step(index, "?", (), None, action, True, 0.0, False, "k")

actions = ["guess 3", "look", "guess 5"]
trajectory = Trajectory(
    1, "t", "u", "number_game", {"number": 5}, {}, True, 10.0, None, False, tuple(map(step, range(3), actions))
)
adapter = get_adapter("number_game", None)
record, = label_trajectories([trajectory], adapter)
print(record.status, [item.credit for item in record.steps])
"""


def test_labels_of_the_own_environment(book: SimpleNamespace) -> None:
    assert succeed(run(book.folder, sys.executable, "-c", SCRIPTED)).strip() == "labelled [0, 0, 1]"


def test_a_missing_module_is_named(book: SimpleNamespace) -> None:
    command = book.commands[2].replace("--import number_credit", "--import nowhere.at_all")
    done = run(book.folder, "bash", "-c", command)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "--import nowhere.at_all" in done.stderr
