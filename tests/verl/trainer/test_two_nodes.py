# SPDX-License-Identifier: Apache-2.0
"""Training across two Ray nodes gives the one-node result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl.trainer.alfworld_run import changed_by, exported_weights, logged, model_weights

REPO_ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_two_nodes_equal_one(games_and_policy: tuple[Path, Path], tmp_path: Path) -> None:
    games, model = games_and_policy
    # A program of its own: this session may have a Ray instance of its own, and a process has only one.
    command = [sys.executable, "-m", "tests.verl.trainer.two_nodes", str(games), str(model), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=REPO_ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    nodes = json.loads((tmp_path / "nodes.json").read_text())
    assert len(nodes) == len(set(nodes)) == 2, "each rank on a node of its own"
    two, one = logged(tmp_path / "two"), logged(tmp_path / "one")
    assert [line["step"] for line in two] == [1, 2]
    for name in ("episode/reward/mean", "rollout/num_rows", "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], abs=1e-5), name
    left, right = exported_weights(tmp_path / "two", 2), exported_weights(tmp_path / "one", 2)
    assert changed_by(left, right) < 1e-5
    assert changed_by(model_weights(model), left) > 1e-4
