# SPDX-License-Identifier: Apache-2.0
"""Entry programs as a user meets them: a tiny program on the core config, run as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig

from verl.utils.cli import hydra_program
from verl.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
import atexit, sys
from verl.utils.cli import hydra_program
from verl.utils.errors import UserError

def main(cfg):
    from verl.trainer.config.schema import PPOConfig, build_config
    built = build_config(PPOConfig, cfg)
    if built.trainer.experiment_name == "bug":
        raise RuntimeError("a bug")
    if built.trainer.experiment_name == "user":
        raise UserError("two\\nlines")
    sys.stdout.write(f"epochs {built.trainer.total_epochs}\\n")

def report():
    heavy = sorted({"torch", "vllm", "flash_attn", "ray", "transformers"} & set(sys.modules))
    sys.stdout.write(f"heavy {heavy}\\n")

if __name__ == "__main__":
    atexit.register(report)
    hydra_program(main, "verl.trainer.config", "ppo_trainer")()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(done: subprocess.CompletedProcess[str], expected: str) -> None:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and expected in lines[0], done.stderr
    assert "Traceback" not in done.stdout


def test_a_run_gets_its_overrides_and_leaves_no_files(folder: Path) -> None:
    done = run(
        folder, "trainer.total_epochs=7", "+actor_rollout_ref.model.override_config.n=2", "+data.seed=3", "++env.seed=1"
    )
    assert done.returncode == 0, done.stderr
    assert "epochs 7" in done.stdout and "heavy []" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["program.py"]


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--cfg", "job", "--resolve", "trainer.nnodes=2"]])
def test_help_is_quick_and_imports_nothing_heavy(folder: Path, flags: list[str]) -> None:
    start = time.monotonic()
    done = run(folder, *flags)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 15
    assert "adv_estimator: gae" in done.stdout and "heavy []" in done.stdout
    assert "epochs" not in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("trainer.total_epoch=7", "unknown config key trainer.total_epoch; did you mean trainer.total_epochs?"),
        ("+trainer.total_epoch=7", "unknown config key trainer.total_epoch; did you mean trainer.total_epochs?"),
        ("~trainer.total_epoch", "unknown config key trainer.total_epoch; did you mean trainer.total_epochs?"),
        ("+trainer.total_epochs=7", "trainer.total_epochs exists already; write it without the leading +"),
        ("actor_rollout_ref.model.override_config.n_layer=2", "add it with +actor_rollout_ref.model.override_config"),
        ("sglang", "cannot read the override 'sglang' (an override has the form key=value)"),
        ("trainer.logger=[console", "cannot read the override 'trainer.logger=[console'"),
        ("trainer.logger=console,wandb", "trainer.logger"),
        ("trainer.total_epochs=many", "trainer.total_epochs=many: expected an integer"),
        ("trainer.experiment_name=user", "error: two lines"),
        ("--config-name=nowhere", "nowhere"),
    ],
)
def test_mistakes_are_one_line_with_status_2(folder: Path, argument: str, expected: str) -> None:
    assert_refused(run(folder, argument), expected)
    assert sorted(path.name for path in folder.iterdir()) == ["program.py"]


def test_an_unknown_key_is_found_with_help_and_in_sweeps(folder: Path) -> None:
    assert_refused(run(folder, "--help", "trainer.node=1"), "did you mean trainer.nnodes?")
    assert_refused(run(folder, "-m", "trainer.node=1,2"), "did you mean trainer.nnodes?")


def test_only_the_first_rank_reports(folder: Path) -> None:
    done = run(folder, "trainer.node=1", RANK="1")
    assert done.returncode == 2 and done.stderr == ""


def test_a_bug_keeps_its_traceback(folder: Path) -> None:
    done = run(folder, "trainer.experiment_name=bug")
    assert done.returncode not in (0, 2)
    assert "Traceback" in done.stderr and 'raise RuntimeError("a bug")' in done.stderr


def test_a_recipe_program_takes_core_and_own_keys(folder: Path) -> None:
    config = folder / "toy_recipe" / "config"
    config.mkdir(parents=True)
    for package in (config.parent, config):
        (package / "__init__.py").write_text("", encoding="utf-8")
    (config / "toy_trainer.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config]\n"
        "defaults: [ppo_trainer, _self_]\n"
        "shaping: {alpha: 0.5, level: episode}\n",
        encoding="utf-8",
    )
    (folder / "program.py").write_text(
        "import sys\n"
        "from verl.utils.cli import hydra_program\n"
        "def main(cfg):\n"
        "    sys.stdout.write(f'{cfg.shaping.alpha} {cfg.trainer.nnodes}\\n')\n"
        "hydra_program(main, 'toy_recipe.config', 'toy_trainer')()\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = run(folder, "shaping.alpha=0.25", "trainer.nnodes=2", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.25 2\n"
    assert_refused(run(folder, "shaping.alpa=1", PYTHONPATH=path), "did you mean shaping.alpha?")
    assert_refused(run(folder, "trainer.nnode=1", PYTHONPATH=path), "did you mean trainer.nnodes?")


def test_a_user_error_from_another_process_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    class Carried(UserError):
        """Like the error that Ray raises at the caller: a subclass whose text is a traceback."""

        def __init__(self, cause: UserError) -> None:
            super().__init__("Traceback (most recent call last):\n...")
            self.cause = cause

    def main(cfg: DictConfig) -> None:
        raise Carried(UserError("data is missing"))

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught:
        hydra_program(main, "verl.trainer.config", "ppo_trainer")()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: data is missing\n"
