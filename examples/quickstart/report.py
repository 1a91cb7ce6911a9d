# SPDX-License-Identifier: Apache-2.0
"""Compares the policies of a quickstart run: `python -m examples.quickstart.report`.

Every policy played the same held-out games with the same seeds. Redundancy is exact, by replay of each success: steps
that can be deleted one at a time, or those that the shortest success found does without (`Profile.label_source`).
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_system.multi_turn_rollout.statistics import bootstrap_mean
from agent_system.step_discriminator.trajectory_analyzer import CreditOptions, get_adapter, label_trajectories
from agent_system.trajectory import Trajectory, load_trajectories, task_key
from examples.quickstart.profiles import PROFILES
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

NOTE = "generated tasks, a tiny policy and one seed: an example of the output, not a result of the method"
REDUNDANT = {
    "single": "the success still comes when this step alone is left out",
    "minimal": "not in the shortest success that leaving steps out leads to",
}


@dataclass(frozen=True)
class Evaluation:
    """One policy on the panel."""

    name: str
    record: dict[str, Any]
    episodes: list[Trajectory]


def load_evaluation(name: str, folder: Path, step: int) -> Evaluation:
    """Result file and episodes that validation wrote for `step`.

    Raises:
        UserError: a file is missing or broken.
    """
    record_file = folder / f"step_{step}.json"
    if not record_file.is_file():
        raise UserError(f"{record_file} not found: the run of {name} did not get as far as its last validation")
    episodes, report = load_trajectories(folder / f"step_{step}.trajectories.jsonl")
    if report.bad:
        raise UserError(f"broken validation file: {report.messages()[0]}")
    return Evaluation(name, json.loads(record_file.read_text(encoding="utf-8")), episodes)


def summarise(evaluation: Evaluation, env: str, data_dir: Path) -> dict[str, Any]:
    """Success with 95 % bootstrap interval over tasks, steps per success, exact redundancy of the successes by kind;
    the task score where it can lie between 0 and 1."""
    episodes = evaluation.episodes
    won = [episode for episode in episodes if episode.success]
    games = [task_key(episode.task) for episode in episodes]
    adapter = get_adapter(env, data_dir)
    source = PROFILES[env].label_source
    records = label_trajectories(won, adapter, options=CreditOptions(mode=source, label_source=source))
    labelled = [(episode, record) for episode, record in zip(won, records) if record.redundancy is not None]
    kinds: dict[str, int] = defaultdict(int)
    for _, record in labelled:
        for kind, count in record.kinds().items():
            kinds[kind] += count
    scores = [episode.task_score or 0.0 for episode in episodes]
    num_steps = sum(record.num_steps for _, record in labelled)
    keys = [task_key(episode.task) for episode, _ in labelled]
    return {
        "policy": evaluation.name,
        "step": evaluation.record["step"],
        "num_games": evaluation.record["num_tasks"],
        "num_episodes": len(episodes),
        "success": interval([float(episode.success) for episode in episodes], games),
        "task_score": interval(scores, games) if any(0.0 < score < 1.0 for score in scores) else None,
        "steps_per_success": interval([float(record.num_steps) for _, record in labelled], keys),
        "redundancy": interval([float(record.redundancy or 0.0) for _, record in labelled], keys),
        "redundant_steps_by_kind": {kind: count / num_steps for kind, count in sorted(kinds.items())}
        if num_steps
        else {},
        "success_by_task_type": {
            name: entry["mean"] for name, entry in evaluation.record["success_by_task_type"].items()
        },
    }


def interval(values: list[float], groups: list[str]) -> dict[str, float] | None:
    """Mean of the values and its 95 % bootstrap interval over groups (tasks); None without values."""
    if not values:
        return None
    low, high = bootstrap_mean(values, groups)
    return {"mean": float(np.mean(values)), "low": low, "high": high}


def steps_on_common_wins(first: Evaluation, second: Evaluation) -> dict[str, float] | None:
    """Mean steps of both policies on the games that both win, one value a game, and how many games that are."""
    means = []
    for evaluation in (first, second):
        lengths: dict[str, list[int]] = defaultdict(list)
        for episode in evaluation.episodes:
            if episode.success:
                lengths[task_key(episode.task)].append(len(episode.steps))
        means.append({key: float(np.mean(values)) for key, values in lengths.items()})
    common = sorted(means[0].keys() & means[1].keys())
    if not common:
        return None
    return {
        "num_games": len(common),
        first.name: float(np.mean([means[0][key] for key in common])),
        second.name: float(np.mean([means[1][key] for key in common])),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""

    def cell(value: dict[str, float] | None, scale: float, digits: int) -> str:
        if value is None:
            return "-"
        mean, low, high = (f"{scale * value[key]:.{digits}f}" for key in ("mean", "low", "high"))
        return f"{mean} [{low}, {high}]"

    columns = [
        ("success % [95 % CI]", "success", 100, 1),
        ("task score %", "task_score", 100, 1),
        ("steps per success", "steps_per_success", 1, 1),
        ("redundant steps %", "redundancy", 100, 1),
    ]
    shown = [column for column in columns if column[1] != "task_score" or any(row["task_score"] for row in rows)]
    lines = ["| " + " | ".join(["policy", *(title for title, *_ in shown)]) + " |", "|---" * (len(shown) + 1) + "|"]
    for row in rows:
        cells = [cell(row[key], scale, digits) for _, key, scale, digits in shown]
        lines.append("| " + " | ".join([row["policy"], *cells]) + " |")
    return "\n".join(lines)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The training steps of a run's `metrics.jsonl`; of a step logged twice (after a resume) the later line."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "episode/success_rate" in entry:
            by_step[int(entry["step"])] = entry
    return [by_step[step] for step in sorted(by_step)]


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Training curves: success, episode length, and the share of steps called redundant where it was measured."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("episode/success_rate", "success rate of the training rollouts"),
        ("episode/length/mean", "turns per episode"),
        ("traj_evolve/redundancy_rate", "share of redundant steps in successes"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 3.6))
    for axis, (key, title) in zip(axes, panels):
        for name, entries in runs.items():
            points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
            if points:
                axis.plot(*zip(*points), label=name, marker=".")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend(fontsize=8)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    atomic_write(path, buffer.getvalue())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare the policies of a quickstart run.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the quickstart run")
    parser.add_argument("--env", choices=PROFILES, default=next(iter(PROFILES)), help="default %(default)s")
    parser.add_argument("--data-dir", type=Path, required=True, help="data folder of the environment")
    parser.add_argument("--steps", type=int, required=True, help="training steps of both RL runs")
    args = parser.parse_args()
    grpo, evolve = args.out / "grpo", args.out / "traj_evolve"
    evaluations = [
        load_evaluation("SFT", grpo / "validation", 0),
        load_evaluation("GRPO", grpo / "validation", args.steps),
        load_evaluation("TrajEvolve", evolve / "validation", args.steps),
    ]
    panels = {evaluation.record["panel_hash"] for evaluation in evaluations}
    if len(panels) != 1:
        raise UserError(f"the policies were not evaluated on the same games (panels {sorted(panels)})")
    rows = [summarise(evaluation, args.env, args.data_dir) for evaluation in evaluations]
    discriminator = json.loads((args.out / "discriminator" / "report.json").read_text(encoding="utf-8"))
    summary = {
        "note": NOTE,
        "panel_hash": panels.pop(),
        "split": evaluations[0].record["split"],
        "sampling": evaluations[0].record["sampling"],
        "versions": evaluations[0].record["versions"],
        "policies": rows,
        "common_wins": steps_on_common_wins(evaluations[1], evaluations[2]),
        "discriminator": discriminator,
    }
    plot({"GRPO": read_metrics(grpo), "TrajEvolve": read_metrics(evolve)}, args.out / "curves.png")
    atomic_write(args.out / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    print(table(rows))
    panel = f"{rows[0]['num_games']} held-out {PROFILES[args.env].tasks}, {rows[0]['num_episodes']} episodes each"
    print(f"\n{panel}; redundant: {REDUNDANT[PROFILES[args.env].label_source]}; {NOTE}.")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
