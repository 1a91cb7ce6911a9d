# SPDX-License-Identifier: Apache-2.0
"""The file of a run's episodes, which an interrupted run continues, and the summary of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from agent_system.multi_turn_rollout.episode_buffer import Seat
from agent_system.multi_turn_rollout.validation import success_by_task_type, success_summary
from agent_system.trajectory import Trajectory, append_trajectories, load_trajectories, save_trajectories
from examples.prompt_agent.play import Usage
from verl.utils.errors import UserError

__all__ = ["EpisodeFile", "Prices", "summarise", "table"]


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens."""

    prompt: float
    completion: float

    def cost(self, usage: Usage) -> float:
        """Dollars."""
        return (self.prompt * usage.prompt_tokens + self.completion * usage.completion_tokens) / 1e6


class EpisodeFile:
    """A trajectory file that grows by whole episodes while a run is under way and is sorted at its end.

    Finished, its bytes depend on the answers only, not on the order in which they came or on interruptions.
    """

    def __init__(self, path: Path, name: str) -> None:
        """
        Args:
            path: may exist already, with episodes of the same run.
            name: `run_name` of the run.

        Raises:
            UserError: the file holds something else.
        """
        self._path = path
        self.episodes: dict[str, Trajectory] = {}
        """By `traj_uid`."""
        if not path.exists():
            return
        loaded, report = load_trajectories(path)
        foreign = [episode.traj_uid for episode in loaded if not episode.traj_uid.startswith(f"{name}-")]
        # A process that was killed while it wrote the first episode leaves the beginning of one.
        if foreign or (report.bad and not loaded and not path.read_bytes().startswith(b'{"schema_version"')):
            raise UserError(
                f"--out {path} holds {f'episodes of another run ({foreign[0]})' if foreign else 'no episodes'}; name a "
                "new file, or repeat the command of that run (same model, sampling, seed, split, group size and env "
                "settings) to continue it."
            )
        for episode in loaded:
            _read_usage(episode, path)
            self.episodes[episode.traj_uid] = episode

    def missing(self, seats: Sequence[Seat]) -> list[Seat]:
        """The seats without an episode."""
        return [seat for seat in seats if seat.traj_uid not in self.episodes]

    def add(self, episode: Trajectory) -> None:
        """Put one episode at the end of the file, safely on disk."""
        append_trajectories(self._path, [episode])
        self.episodes[episode.traj_uid] = episode

    def finish(self, seats: Sequence[Seat]) -> list[Trajectory]:
        """Sort the file: the episodes of `seats` in their order (returned), then what a longer run had besides."""
        planned = [self.episodes[seat.traj_uid] for seat in seats]
        names = {seat.traj_uid for seat in seats}
        rest = [episode for uid, episode in self.episodes.items() if uid not in names]
        save_trajectories(self._path, [*planned, *rest])
        return planned


def _read_usage(episode: Trajectory, path: Path) -> Usage:
    """`policy.usage` of a record.

    Raises:
        UserError: it is missing or changed.
    """
    record = episode.policy.get("usage")
    known = {item.name for item in fields(Usage)}
    if isinstance(record, dict) and set(record) == known and isinstance(record["oddities"], dict):
        counts = [value for name, value in record.items() if name != "oddities"] + list(record["oddities"].values())
        if all(type(count) is int and count >= 0 for count in counts):
            return Usage(**record)
    raise UserError(f"{path}: episode {episode.traj_uid} has no readable policy.usage; name a new file with --out.")


def summarise(episodes: Sequence[Trajectory], prices: Prices | None, path: Path) -> dict[str, Any]:
    """Success in all and by task type; requests, tokens and cost (US dollars, null without prices), also per episode.

    JSON types.
    """
    usages = [_read_usage(episode, path) for episode in episodes]
    total = Usage.total(usages)
    scores = [episode.task_score for episode in episodes if episode.task_score is not None]
    return {
        "num_episodes": len(episodes),
        "num_tasks": len({episode.uid for episode in episodes}),
        "policy": {name: value for name, value in episodes[0].policy.items() if name != "usage"},
        "success": success_summary(episodes),
        "success_by_task_type": success_by_task_type(episodes),
        "mean_task_score": sum(scores) / len(scores) if scores else None,
        "valid_action_ratio": _share([step.is_action_valid for episode in episodes for step in episode.steps]),
        "usage": asdict(total),
        "cost_usd": prices.cost(total) if prices else None,
        "episodes": [
            {
                "traj_uid": episode.traj_uid,
                "success": episode.success,
                "num_steps": len(episode.steps),
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cost_usd": prices.cost(usage) if prices else None,
            }
            for episode, usage in zip(episodes, usages, strict=True)
        ],
    }


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people: a Markdown table by task type, then the costs."""
    lines = ["| task type | episodes | success % [95 % CI] | steps per success |", "|---|---|---|---|"]
    for name, row in [*summary["success_by_task_type"].items(), ("all", summary["success"])]:
        low, high = row["wilson95"]
        steps = "-" if row["steps_per_success"] is None else f"{row['steps_per_success']:.1f}"
        interval = f"{100 * row['mean']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        lines.append(f"| {name} | {row['num_episodes']} | {interval} | {steps} |")
    usage = summary["usage"]
    cost = "" if summary["cost_usd"] is None else f", {summary['cost_usd']:.4f} US dollars"
    lines += [
        "",
        f"{usage['requests']:,} answers after {usage['retries']:,} retries, {usage['prompt_tokens']:,} prompt and "
        f"{usage['completion_tokens']:,} completion tokens{cost}.",
    ]
    if usage["without_usage"]:
        lines.append(f"{usage['without_usage']:,} answers did not say their tokens: the sums are too small.")
    if usage["at_token_limit"]:
        lines.append(f"{usage['at_token_limit']:,} answers were stopped at the token limit.")
    if usage["oddities"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in usage["oddities"].items())
        lines.append(f"Answers without an ordinary text: {kinds}.")
    return "\n".join(lines) + "\n"
