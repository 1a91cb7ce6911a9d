# SPDX-License-Identifier: Apache-2.0
"""What TRIAL costs: the hindsight pass as a share of a training step, and its equations against a loop over rows.

``python -m tests.bench.bench_trial [--quick]``. The steps are real ones on generated ALFWorld games with a tiny policy,
one rank in this process; the first step of a run is left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe.trial.allocation import dense_term, relative_weights
from tests.bench.table import environment_line, format_seconds, print_table, time_best
from tests.helpers.tiny import make_tiny_model
from tests.recipe.trial.support import read_trial_config
from tests.verl.trainer.alfworld_run import alfworld_overrides
from verl.trainer.main_ppo import build_trainer
from verl.trainer.ppo.worker_groups import local_worker_groups

TURNS = 20
"""Turns of a trajectory in the second table."""


def step_rows(world: Path, steps: int, size: dict[str, int], model: Path) -> list[list[str]]:
    """One run with the recipe; the phases of its steps, and their shares."""
    from agent_system.environments import make_envs

    groups, members = size["groups"], size["members"]
    with tempfile.TemporaryDirectory() as folder:
        given = [
            *alfworld_overrides(world, model, Path(folder)), f"data.train_batch_size={groups}",
            f"env.rollout.n={members}", f"env.max_steps={size['turns']}", "data.max_prompt_length=512",
            f"data.max_response_length={size['tokens']}", f"trainer.total_epochs={steps}", "trainer.save_freq=-1",
        ]  # fmt: skip
        config, recipes = read_trial_config(given)
        train_envs, val_envs = make_envs(config)
        trainer = build_trainer(
            config, recipes, device="cpu", make_worker_groups=local_worker_groups, train_envs=train_envs,
            val_envs=val_envs,
        )  # fmt: skip
        trainer.init_workers()
        trainer.fit()
        train_envs.close()
        val_envs.close()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][1:]

    def seconds(name: str) -> float:
        return float(np.mean([line[f"timing_s/{name}"] for line in lines]))

    rows = np.mean([line["rollout/num_rows"] for line in lines])
    step, ordinary = seconds("step"), seconds("old_log_prob")
    table = []
    for phase, name in (
        ("rollout", "gen"),
        ("ordinary log-probs", "old_log_prob"),
        ("hindsight log-probs", "hindsight_log_prob"),
        ("gaps, multipliers, dense term", "after_advantage"),
        ("update", "update_actor"),
        ("whole step", "step"),
    ):
        spent = seconds(name)
        share, ratio = f"{100 * spent / step:.1f} %", f"{spent / ordinary:.2f}"
        table.append([f"{rows:.0f}", phase, format_seconds(spent), share, ratio])
    return table


def by_row(clipped: Tensor, eligible: Tensor, trajectory: Tensor, beta: float) -> Tensor:
    """The equations with a loop over rows."""
    turns: dict[int, list[int]] = {}
    for row, number in enumerate(trajectory.tolist()):
        turns.setdefault(number, []).append(row)
    result = torch.zeros_like(clipped)
    for rows in turns.values():
        magnitude = [clipped[row].abs().double().sum().item() for row in rows]
        tokens = [int(eligible[row].sum()) for row in rows]
        for row, m, n in zip(rows, magnitude, tokens, strict=True):
            if n:
                weight = (m / sum(magnitude)) / (n / sum(tokens)) if sum(magnitude) else 1.0
                result[row] = beta * weight * clipped[row]
    return result


def equation_row(num_rows: int, tokens: int) -> list[str]:
    """Vectorised against row by row; their results are compared first."""
    generator = torch.Generator().manual_seed(0)
    eligible = torch.rand(num_rows, tokens, generator=generator) < 0.6
    clipped = torch.randn(num_rows, tokens, generator=generator).clamp(-1, 1) * eligible
    trajectory = torch.arange(num_rows) // TURNS

    def ours() -> Tensor:
        weights = relative_weights(clipped.abs().double().sum(-1), eligible.sum(-1), trajectory)
        return dense_term(clipped, weights, 0.1)

    def slow() -> Tensor:
        return by_row(clipped, eligible, trajectory, 0.1)

    torch.testing.assert_close(ours(), slow())
    fast, loop = time_best(ours), time_best(slow, 2)
    return [f"{num_rows:,}", str(tokens), format_seconds(loop), format_seconds(fast), f"{loop / fast:.0f}x"]


def make_world(folder: Path, model: dict[str, Any]) -> tuple[Path, Path]:
    """Games, and a policy of about the quickstart's size."""
    from agent_system.environments.env_package.alfworld.generate import generate_games

    games = generate_games(folder / "games", 24, 2, 2, seed=1, max_receptacles=5, max_objects=6)
    return games, make_tiny_model(folder / "model", **model)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows: a check that everything runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    large: dict[str, Any] = {"hidden_size": 128, "num_layers": 3, "intermediate_size": 256, "vocab_size": 700}
    with tempfile.TemporaryDirectory() as folder:
        games, model = make_world(Path(folder), {} if quick else large)
        size = {"groups": 2, "members": 2, "turns": 3, "tokens": 4}
        if not quick:
            size = {"groups": 4, "members": 8, "turns": 8, "tokens": 16}
        rows = step_rows(games, 2 if quick else 4, size, model)
    print_table(["rows", "phase", "time", "share of the step", "ordinary log-probs = 1"], rows)
    print()
    sizes = [(200, 16)] if quick else [(2560, 16), (2560, 512), (25600, 512)]
    heads = ["rows", "tokens", "row by row", "vectorised", "ratio"]
    print_table(heads, [equation_row(*pair) for pair in sizes])
    print(f"\n{environment_line(('torch', 'transformers'))}; one thread")


if __name__ == "__main__":
    main()
