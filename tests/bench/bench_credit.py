# SPDX-License-Identifier: Apache-2.0
"""Cost of credit analysis: `python -m tests.bench.bench_credit [--quick]`.

Everything is measured in one run, on generated ALFWorld games played by the explorer with detours. The stock engine is
too slow to replay every deletion here: a few deletions are replayed in it (their labels are compared), and the time of
its resets and steps is scaled to the number that all deletions take. Nothing else is scaled.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_system.environments.env_package.alfworld import AlfworldGame
from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.step_discriminator.trajectory_analyzer import (
    CreditOptions,
    CreditRecord,
    EnvAdapter,
    get_adapter,
    label_trajectories,
)
from agent_system.step_discriminator.trajectory_analyzer.analyze import analyze, run_labelling
from agent_system.step_discriminator.trajectory_analyzer.collect import CollectOptions, collect
from agent_system.step_discriminator.trajectory_analyzer.expert_sources import AlfworldExperts
from agent_system.step_discriminator.trajectory_analyzer.replay import replay_naively
from agent_system.trajectory import Trajectory, save_trajectories
from tests.bench.table import environment_line, format_seconds, print_table, time_best

SINGLE = CreditOptions(evolve=False)
MINIMAL = CreditOptions(mode="minimal")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    games: int
    episodes: int
    long: int
    """Trajectories of about 30 steps."""
    stock_replays: int
    """Per stock trajectory."""
    stock_trajectories: int
    repeat: int
    scaling: int
    """Copies of the episodes in the comparison of worker numbers."""


FULL = Sizes(games=100, episodes=200, long=10, stock_replays=3, stock_trajectories=3, repeat=5, scaling=30)
QUICK = Sizes(games=24, episodes=48, long=3, stock_replays=1, stock_trajectories=1, repeat=2, scaling=8)


@dataclass
class StockCost:
    """Seconds of the stock engine, and how many resets and steps they were measured on."""

    load: float = 0.0
    reset: float = 0.0
    step: float = 0.0
    loads: int = 0
    resets: int = 0
    steps: int = 0

    def of(self, resets: int, steps: int) -> float:
        """Seconds for one load and so many resets and steps."""
        return self.load / self.loads + resets * self.reset / self.resets + steps * self.step / self.steps


def measure_stock(
    trajectories: Sequence[Trajectory], records: Sequence[CreditRecord], data_dir: Path, replays: int
) -> StockCost:
    """Replay evenly spaced deletions in the stock engine; raises AssertionError where a label differs."""
    cost = StockCost()
    for trajectory, record in zip(trajectories, records, strict=True):
        start = time.perf_counter()
        game = AlfworldGame(data_dir / trajectory.task["gamefile"], engine="stock")
        cost.load += time.perf_counter() - start
        cost.loads += 1
        actions = [step.action for step in trajectory.steps]
        for number in range(replays):
            index = (2 * number + 1) * len(actions) // (2 * replays)
            start = time.perf_counter()
            game.reset()
            cost.reset += time.perf_counter() - start
            start = time.perf_counter()
            taken, won = 0, False
            for action in actions[:index] + actions[index + 1 :]:
                won = game.step(action)[2]
                taken += 1
                if won:
                    break
            cost.step += time.perf_counter() - start
            cost.resets += 1
            cost.steps += taken
            label = record.steps[index]
            assert (won, taken) == (label.ablated_success, label.ablated_steps), (trajectory.traj_uid, index)
    return cost


def naive_here(trajectories: Sequence[Trajectory], adapter: EnvAdapter) -> None:
    """Every deletion replayed from the start in this project's own engine."""
    for trajectory in trajectories:
        game = adapter.make_game(trajectory.task)
        actions = [step.action for step in trajectory.steps]
        replay_naively(game, actions)
        for index in range(len(actions)):
            replay_naively(game, actions[:index] + actions[index + 1 :])


def first_sight(trajectories: Sequence[Trajectory], data_dir: Path, folder: Path) -> float:
    """Seconds for trajectories whose game files this process has never read."""
    for trajectory in trajectories:
        gamefile = trajectory.task["gamefile"]
        (folder / gamefile).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data_dir / gamefile, folder / gamefile)
    adapter = get_adapter("alfworld", folder)
    start = time.perf_counter()
    label_trajectories(trajectories, adapter, options=SINGLE)
    return time.perf_counter() - start


def compare_with_stock(long: Sequence[Trajectory], data_dir: Path, folder: Path, sizes: Sizes) -> None:
    adapter = get_adapter("alfworld", data_dir)
    records = label_trajectories(long, adapter, options=SINGLE)
    chosen = slice(0, sizes.stock_trajectories)
    stock = measure_stock(long[chosen], records[chosen], data_dir, sizes.stock_replays)
    count = len(long)
    seconds = {
        "stock engine, every deletion from the start (scaled)": sum(
            stock.of(record.replays, record.env_steps_naive) for record in records
        ),
        "own engine, every deletion from the start": time_best(lambda: naive_here(long, adapter), sizes.repeat),
        "snapshots and memo": time_best(lambda: label_trajectories(long, adapter, options=SINGLE), sizes.repeat),
        "snapshots and memo, game file not read before": first_sight(long, data_dir, folder),
        "snapshots and memo, `mode=minimal`": time_best(
            lambda: label_trajectories(long, adapter, options=MINIMAL), sizes.repeat
        ),
    }
    slowest = next(iter(seconds.values()))
    replays = sum(record.replays for record in records)
    length = sum(record.num_steps for record in records) / count
    print(f"All deletions of a trajectory, mean of {count} with {length:.1f} steps:\n")
    rows: list[list[str]] = []
    for name, value in seconds.items():
        per_replay = "" if "minimal" in name else format_seconds(value / replays)
        rows.append([name, format_seconds(value / count), per_replay, f"{slowest / value:,.0f}"])
    print_table(["", "per trajectory", "per replay", "times faster"], rows)
    print(
        f"\nStock: measured on {stock.loads} loads ({format_seconds(stock.load / stock.loads)} each), {stock.resets} "
        f"resets ({format_seconds(stock.reset / stock.resets)}) and {stock.steps} steps "
        f"({format_seconds(stock.step / stock.steps)}), labels equal; scaled to {replays} replays of "
        f"{sum(record.env_steps_naive for record in records)} steps in all."
    )


def count_steps(trajectories: Sequence[Trajectory], data_dir: Path) -> None:
    adapter = get_adapter("alfworld", data_dir)
    rows: list[list[str]] = []
    for name, options in (("single", SINGLE), ("single, evolved", CreditOptions()), ("minimal", MINIMAL)):
        records = label_trajectories(trajectories, adapter, options=options)
        used, naive = (sum(getattr(item, key) for item in records) for key in ("env_steps_used", "env_steps_naive"))
        replays = sum(item.replays for item in records)
        rows.append([name, f"{replays:,}", f"{used:,}", f"{naive:,}", f"{naive / used:.1f}"])
    print(f"\nEnvironment steps for the {len(trajectories)} trajectories:\n")
    print_table(["mode", "replays", "steps used", "steps naively", "ratio"], rows)


def time_program(trajectories: Sequence[Trajectory], data_dir: Path, folder: Path) -> None:
    """Whole analyses, from reading the trajectories to writing all files."""
    source = folder / "trajectories.jsonl"
    save_trajectories(source, trajectories)
    rows: list[list[str]] = []
    for name, options, workers in (
        ("`single` with evolved trajectories, 1 process", CreditOptions(), 1),
        ("`minimal`, 1 process", MINIMAL, 1),
        ("`minimal`, 2 workers, Ray started for it", MINIMAL, 2),
    ):
        result = analyze([source], folder / f"out{len(rows)}", options=options, data_dir=data_dir, workers=workers)
        rows.append([name, format_seconds(result.wall_time_s)])
    mean = sum(len(item.steps) for item in trajectories) / len(trajectories)
    print(
        f"\nThe whole analysis of {len(trajectories)} explorer trajectories (mean {mean:.1f} steps), files included:\n"
    )
    print_table(["", "time"], rows)


def scale_workers(trajectories: Sequence[Trajectory], data_dir: Path, copies: int) -> None:
    """Labelling alone, without the start of workers and without files."""
    adapter = get_adapter("alfworld", data_dir)
    many = [item for _ in range(copies) for item in trajectories]
    rates = {}
    for workers in (1, 2):
        results = run_labelling(many, {"alfworld": adapter}, MINIMAL, workers)
        # The first results come when the workers are up and have measured how long a job takes.
        skipped = sum(1 for _ in zip(range(len(many) // 10), results))
        start = time.perf_counter()
        count = sum(1 for _ in results)
        rates[workers] = count / (time.perf_counter() - start)
        assert skipped + count == len(many)
    print(f"\nLabelling with `mode=minimal`, {len(many):,} trajectories, workers up:\n")
    print_table(
        ["workers", "trajectories/s", "ratio"],
        [[workers, f"{rate:,.0f}", f"{rate / rates[1]:.2f}"] for workers, rate in rates.items()],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all measurements; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_credit", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small numbers, under 20 s")
    parser.add_argument("--no-scaling", action="store_true", help="leave out what needs Ray")
    args = parser.parse_args(argv)
    sizes = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data_dir = generate_games(folder / "games", train=sizes.games, valid_seen=0, valid_unseen=0, seed=7)
        source = AlfworldExperts(data_dir)
        episodes = collect(source, "train", sizes.episodes, CollectOptions(detour_rate=0.4, error_rate=0.05, seed=1))
        pool = collect(source, "train", 2 * sizes.episodes, CollectOptions(detour_rate=0.5, seed=2))
        long = [item for item in pool if item.success and 28 <= len(item.steps) <= 32][: sizes.long]
        compare_with_stock(long, data_dir, folder / "copies", sizes)
        won = [item for item in episodes if item.success]
        count_steps(won, data_dir)
        if not args.no_scaling:
            time_program(episodes, data_dir, folder)
            scale_workers(won, data_dir, sizes.scaling)
    print(f"\n{environment_line(('alfworld', 'textworld', 'ray'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
