# SPDX-License-Identifier: Apache-2.0
"""docs/recipes.md: its recipe is run, and it leaves no hook method out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agent_system.test_docs_extending import metrics, run, succeed
from tests.recipe.traj_evolve.support import logged, policy_weights, run_phases, same
from tests.verl.trainer.toy_run import toy_overrides, toy_trainer
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import read_config
from verl.trainer.ppo import recipes
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.recipes import TrainerHook
from verl.utils.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs"
MAX_LINES = 60


def blocks(name: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", (DOCS / name).read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that both documents name."""
    target = tmp_path_factory.mktemp("recipes")
    for block in [*blocks("extending.md"), *blocks("recipes.md")]:
        name = re.match(r"# ([\w.]+\.(?:py|sh))\n", block)
        if name:
            (target / name[1]).write_text(block, encoding="utf-8")
    return target


@pytest.fixture
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(recipes._REGISTRY, "recipes", dict(recipes._REGISTRY.recipes))
    yield
    sys.modules.pop("far_context", None)


def trainer_with(model: Path, out: Path, *overrides: str) -> RayPPOTrainer:
    given = ["env.env_name=toy", "algorithm.recipe_modules=[far_context]", "data.max_response_length=4", *overrides]
    config, found = read_config(load_config("ppo_trainer", [*toy_overrides(model, out), *given]))
    trainer = toy_trainer(config, recipes=found)
    trainer.init_workers()
    return trainer


def test_the_recipe_is_small_and_the_only_one(folder: Path) -> None:
    text = (folder / "far_context.py").read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert len(blocks("recipes.md")) == 2


def test_every_method_of_a_hook_is_in_the_table() -> None:
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    table = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    methods = [name for name in vars(TrainerHook) if not name.startswith("_") and name != "name"]
    assert len(methods) >= 13
    for name in methods:
        assert re.search(rf"`{name}\b", table), name


def test_the_recipe_trains(importable: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_with(tiny_model_dir, tmp_path / "a", "trainer.total_epochs=2")
    trainer.fit()
    for line in logged(tmp_path / "a"):
        assert line["far_context/gain"] != 0.0 and line["timing_s/near_log_prob"] > 0.0
    off = trainer_with(tiny_model_dir, tmp_path / "b", "trainer.total_epochs=2", "+far_context.beta=0")
    off.fit()
    assert not any("far_context" in name for line in logged(tmp_path / "b") for name in line)
    assert not same(policy_weights(trainer), policy_weights(off))


def test_its_pass_sees_the_end_of_the_prompt_only(importable: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    keep = 8
    trainer = trainer_with(tiny_model_dir, tmp_path, f"+far_context.keep={keep}")
    tensors = run_phases(trainer, until="reward").batch.batch
    worker: Any = trainer.actor_rollout_wg.worker
    width = tensors["responses"].shape[1]
    length = int(tensors["response_mask"][3].sum())
    ids = tensors["input_ids"][3, -width - keep : tensors["input_ids"].shape[1] - width + length]
    with torch.no_grad():
        logits = worker.actor_model(input_ids=ids[None]).logits[0].float()
    expected = logits.log_softmax(-1)[keep - 1 : -1].gather(1, ids[keep:, None]).squeeze(1)
    torch.testing.assert_close(tensors["near_log_probs"][3, :length], expected, atol=1e-5, rtol=1e-5)


def test_what_cannot_work_is_refused(importable: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"keep must be below data\.max_prompt_length"):
        trainer_with(tiny_model_dir, tmp_path, "+far_context.keep=128")


@pytest.mark.slow
def test_the_command(folder: Path, tiny_model_dir: Path) -> None:
    succeed(run(folder, "bash", "-c", blocks("recipes.md")[1], MODEL=str(tiny_model_dir)))
    lines = metrics(folder / "runs" / "far_context")
    assert len(lines) == 2 and all("far_context/gain" in line for line in lines)
