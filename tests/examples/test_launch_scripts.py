# SPDX-License-Identifier: Apache-2.0
"""Launch scripts: syntax, help, how arguments reach Hydra, and what they refuse."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path
    for folder in ("examples", "agent_system", "requirements", "tests")
    for path in (ROOT / folder).rglob("*.sh")
    if "outputs" not in path.parts
)
RL_SCRIPTS = sorted((ROOT / "examples").glob("*_trainer/run_*.sh"))


def run(script: Path, *arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "ALFWORLD_DATA": "", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", str(script), *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_syntax(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "set -euo pipefail" in script.read_text() or "common.sh" in script.read_text()


@pytest.mark.parametrize("script", RL_SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_help_says_how_to_call_it(script: Path, tmp_path: Path) -> None:
    result = run(script, "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "key=value" in result.stdout
    assert "source " not in result.stdout


@pytest.mark.parametrize("script", RL_SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_engine_and_overrides_reach_the_config(script: Path, tmp_path: Path) -> None:
    result = run(script, "hf", "env.max_steps=7", "--cfg", "job", "env.seed=5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "max_steps: 7" in result.stdout
    assert "seed: 5" in result.stdout
    assert "name: hf" in result.stdout
    default = run(script, "--cfg", "job", "env.max_steps=7", cwd=tmp_path)
    assert "max_steps: 7" in default.stdout
    assert "name: vllm" in default.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", RL_SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("rollout.name=vllm", "hf")),
        (("hf", "env.max_step=7"), ("env.max_step", "env.max_steps")),
        (("hf", "actor_rollout_ref.actor.ppo_mini_batch_size=3"), ("ppo_mini_batch_size=3", "2 or 4")),
    ],
)
def test_one_sentence_refuses_what_cannot_run(script: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run(script, *arguments)
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last
    assert "Traceback" not in result.stderr
