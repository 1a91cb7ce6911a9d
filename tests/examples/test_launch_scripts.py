# SPDX-License-Identifier: Apache-2.0
"""Launch scripts: syntax, help, how arguments reach Hydra, what they compose to, and what they refuse."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compat.launches import build, compose, config_of
from verl.trainer.config.schema import PPOConfig, SFTConfig, load_config
from verl.trainer.main_ppo import read_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path
    for folder in ("examples", "agent_system", "recipe", "requirements", "tests")
    for path in (ROOT / folder).rglob("*.sh")
    if "outputs" not in path.parts
)
LAUNCHERS = sorted(
    [*(ROOT / "examples").glob("*_trainer/run_*.sh"), *(ROOT / "recipe").glob("*/run_*.sh")]
    + [*(ROOT / "examples/sft").rglob("run_*.sh"), *(ROOT / "examples/generation").glob("run_*.sh")]
)
RL_SCRIPTS = [path for path in LAUNCHERS if "sft" not in path.parts and "generation" not in path.parts]
# One of each program: they are started for real, the others only as far as their command line.
STARTED = [ROOT / "examples" / f"{kind}_trainer" / "run_alfworld.sh" for kind in ("grpo", "traj_evolve")]

# Reference scripts by the path of ours where that is another one.
OTHER_NAMES = {
    "recipe/hgpo/run_alfworld.sh": "recipe/hgpo/run_qwen2.5_1.5b_alfworld_train.sh",
    "recipe/hgpo/run_webshop.sh": "recipe/hgpo/run_qwen2.5_1.5b_webshop_train.sh",
}
# No prompt files are needed, and checkpoints go below the working directory.
DIFFERENT_ON_PURPOSE = {"data.train_files", "data.val_files", "trainer.default_local_dir"}


def script_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run(script: Path, *arguments: str, cwd: Path | None = None, **extra: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "ALFWORLD_DATA": "", "CUDA_VISIBLE_DEVICES": "", **extra}
    return subprocess.run(
        ["bash", str(script), *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env
    )


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stands in for the interpreter and prints its arguments, one a line."""
    path = tmp_path_factory.mktemp("echo") / "python"
    path.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


def command_line(script: Path, echo: str, *arguments: str) -> tuple[str, list[str]]:
    """(module, overrides) that a script would run with."""
    result = run(script, *arguments, PYTHON=echo, HOME="/home/user", DATA="")
    assert result.returncode == 0, result.stderr
    flag, module, *overrides = result.stdout.splitlines()
    assert flag == "-m"
    return module, overrides


@pytest.mark.parametrize("script", SCRIPTS, ids=script_id)
def test_syntax(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "set -euo pipefail" in script.read_text() or "common.sh" in script.read_text()


@pytest.mark.parametrize("script", LAUNCHERS, ids=script_id)
def test_help_says_how_to_call_it(script: Path, tmp_path: Path) -> None:
    result = run(script, "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "key=value" in result.stdout
    assert f"bash {script_id(script)}" in result.stdout
    assert "source " not in result.stdout


@pytest.mark.parametrize("script", RL_SCRIPTS, ids=script_id)
def test_every_override_composes_and_the_run_is_accepted(script: Path, echo: str) -> None:
    module, overrides = command_line(script, echo, "hf", "env.max_steps=7")
    assert overrides[-1] == "env.max_steps=7"
    if module == "verl.trainer.main_ppo":
        tree = load_config("ppo_trainer", overrides)
    else:
        recipe = module.split(".")[1]
        needs_no_discriminator = ["traj_evolve.credit_source=none"] if recipe == "traj_evolve" else []
        tree = load_config(f"{recipe}_trainer", [*overrides, *needs_no_discriminator], f"recipe.{recipe}.config")
    config, _ = read_config(tree)
    assert config.actor_rollout_ref.rollout.name == "hf" and config.env.max_steps == 7
    assert ("Webshop" if "webshop" in script.name else "alfworld") in config.env.env_name
    default = command_line(script, echo)[1]
    assert "actor_rollout_ref.rollout.name=vllm" in default


def _value(built: Any, key: str) -> Any:
    for part in key.split("."):
        built = built[part] if isinstance(built, dict) else getattr(built, part)
    return built


@pytest.fixture(scope="session")
def defaults() -> dict[str, Any]:
    """Config name -> its typed defaults."""
    return {"ppo_trainer": PPOConfig(), "sft_trainer": SFTConfig()}


@pytest.mark.parametrize("script", LAUNCHERS, ids=script_id)
def test_settings_are_the_references(script: Path, echo: str, shared_dir: Path, defaults: dict[str, Any]) -> None:
    """Whatever verl-agent's script of the same name sets has the same value here."""
    launches = json.loads((shared_dir / "compat" / "launch_overrides.json").read_text())
    name = script_id(script)
    theirs = launches.get(OTHER_NAMES.get(name, name))
    if theirs is None:
        pytest.skip(f"verl-agent has no {name}")
    _, ours = command_line(script, echo, *(("1", "/save/path") if "sft" in script.parts else ("vllm",)))
    set_here = {key.lstrip("+"): yaml.safe_load(value) for key, _, value in (text.partition("=") for text in ours)}
    for override in theirs:
        key, _, text = override.lstrip("+").partition("=")
        default = None if key in set_here else _value(defaults[config_of(name)[1]], key)
        wanted, got = yaml.safe_load(text), set_here.get(key, default)
        assert got == wanted or key in DIFFERENT_ON_PURPOSE, (key, got, wanted)


def test_fine_tuning_takes_processes_and_a_folder(echo: str) -> None:
    script = ROOT / "examples/sft/gsm8k/run_qwen_05.sh"
    module, overrides = command_line(script, echo)
    assert module == "verl.trainer.fsdp_sft_trainer" and "trainer.default_local_dir=outputs/sft" in overrides
    module, overrides = command_line(script, echo, "2", "/save", "optim.lr=3")
    assert module == "torch.distributed.run" and "--nproc_per_node=2" in overrides
    assert overrides[overrides.index("-m") + 1] == "verl.trainer.fsdp_sft_trainer"
    assert overrides[-2:] == ["trainer.default_local_dir=/save", "optim.lr=3"]
    for path in (ROOT / "examples/sft").rglob("run_*.sh"):
        build("examples/sft/x", compose("examples/sft/x", command_line(path, echo)[1]))


def test_generation_script_composes(echo: str) -> None:
    module, overrides = command_line(ROOT / "examples/generation/run_qwen_05.sh", echo, "hf")
    assert module == "verl.trainer.main_generation"
    built = build("examples/generation/x", compose("examples/generation/x", overrides))
    assert built.rollout.name == "hf" and built.data.path == "/home/user/data/gsm8k/test.parquet"


@pytest.mark.parametrize("script", STARTED, ids=script_id)
def test_engine_and_overrides_reach_the_program(script: Path, tmp_path: Path) -> None:
    result = run(script, "hf", "env.max_steps=7", "--cfg", "job", "env.seed=5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "max_steps: 7" in result.stdout
    assert "seed: 5" in result.stdout
    assert "name: hf" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("rollout.name=vllm", "hf")),
        (("hf", "env.max_step=7"), ("env.max_step", "env.max_steps")),
        (("hf", "word"), ("'word'", "key=value")),
        (("hf", "actor_rollout_ref.actor.ppo_mini_batch_size=3"), ("ppo_mini_batch_size=3", "2 or 4")),
    ],
)
def test_one_sentence_refuses_what_cannot_run(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run(STARTED[0], *arguments)
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last
    assert "Traceback" not in result.stderr
