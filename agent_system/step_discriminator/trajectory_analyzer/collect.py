# SPDX-License-Identifier: Apache-2.0
"""Stage 1: play an environment's tasks with its scripted explorer and write the episodes to trajectories.jsonl.

    python -m agent_system.step_discriminator.trajectory_analyzer.collect --env alfworld --split train --num 200 \\
        --detour-rate 0.3 --out trajectories.jsonl

The explorer knows only what it has seen. Useless detours and mistakes are mixed in at the given rates. Every episode
draws from a generator of its own (seed, task, episode), so the file does not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_system.programs import check_output, run_program
from agent_system.step_discriminator.trajectory_analyzer.episodes import Choice, EpisodeIdentity, play
from agent_system.step_discriminator.trajectory_analyzer.expert_sources import (
    ExpertSource,
    ExpertTask,
    expert_source,
    known_sources,
)
from agent_system.step_discriminator.trajectory_analyzer.parallel import WorkerLostError, num_workers, run_jobs
from agent_system.step_discriminator.trajectory_analyzer.progress import progress_bar
from agent_system.trajectory import Trajectory, save_trajectories
from verl.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CollectOptions", "EpisodeJob", "collect", "main", "play_episode"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectOptions:
    """How the expert plays; part of every record's `policy`."""

    detour_rate: float = 0.3
    """Chance in [0, 1) of a useless step before each planned one."""
    error_rate: float = 0.0
    """Chance in [0, 1) of a command that is not admissible."""
    seed: int = 0
    max_steps: int | None = None
    """Step limit; None = the environment's usual one."""


@dataclass(frozen=True)
class EpisodeJob:
    """One episode to play."""

    entry: ExpertTask
    episode: int

    def uid(self, seed: int) -> str:
        """Group id: episodes of one task with one seed."""
        return f"explorer-s{seed}-{hashlib.sha256(self.entry.name.encode('utf-8')).hexdigest()[:12]}"


def episode_generator(seed: int, job: EpisodeJob) -> np.random.Generator:
    """The random stream of one episode: a function of seed, task name and episode number only."""
    import numpy as np

    digest = hashlib.blake2b(f"{seed}/{job.entry.name}/{job.episode}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def play_episode(job: EpisodeJob, source: ExpertSource, options: CollectOptions) -> Trajectory:
    """Play one task with the explorer until it ends or the step limit is reached."""
    limit = options.max_steps or source.max_steps
    opened = source.start(job.entry, episode_generator(options.seed, job), options, limit)

    def act(observation: str, info: Mapping[str, Any]) -> Choice:
        choice = opened.expert.act(observation, dict(info))
        response = f"<think>{choice.thought}</think><action>{choice.action}</action>"
        return Choice(choice.action, response, choice.kind)

    uid = job.uid(options.seed)
    identity = EpisodeIdentity(
        traj_uid=f"{uid}-e{job.episode}",
        uid=uid,
        env_name=source.env_name,
        task=opened.task,
        policy={
            "kind": "explorer",
            "model": None,
            "sampling": {"detour_rate": options.detour_rate, "error_rate": options.error_rate},
            "seed": options.seed,
        },
    )
    return play(opened.game, act, identity, limit)


def collect(
    source: ExpertSource,
    split: str,
    num: int,
    options: CollectOptions,
    *,
    workers: int = 1,
    show_progress: bool = False,
) -> list[Trajectory]:
    """Play `num` episodes over the tasks of a split.

    Tasks come in a seeded permutation; when `num` is larger than their number they are played again as further
    episodes of the same groups.

    Raises:
        UserError: no data, an unreadable game, or numbers out of range.
    """
    _check(num, options)
    jobs = _episodes(source.tasks(split), num, options.seed)
    results: dict[int, Trajectory] = {}
    handler = partial(_make_player, source, options)
    with progress_bar("collecting", total=len(jobs), show=show_progress) as advance:
        for index, trajectory in run_jobs(jobs, handler, workers=workers, describe=str):
            results[index] = trajectory
            advance(1)
    return [results[index] for index in range(len(jobs))]


def _check(num: int, options: CollectOptions) -> None:
    if num < 1:
        raise UserError(f"--num {num}: at least one episode is needed.")
    if options.max_steps is not None and options.max_steps < 1:
        raise UserError(f"--max-steps {options.max_steps}: at least one step is needed.")
    for name, rate in (("--detour-rate", options.detour_rate), ("--error-rate", options.error_rate)):
        if not 0.0 <= rate < 1.0:
            raise UserError(f"{name} {rate}: must be in [0, 1).")
    if options.detour_rate + options.error_rate >= 1.0:
        raise UserError(
            f"--detour-rate {options.detour_rate} and --error-rate {options.error_rate} leave no step for the plan; "
            "their sum must be below 1."
        )
    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: must be 0 or more.")


def _episodes(tasks: Sequence[ExpertTask], num: int, seed: int) -> list[EpisodeJob]:
    import numpy as np

    order = np.random.default_rng([seed, 0x5EED]).permutation(len(tasks))
    return [EpisodeJob(tasks[int(order[number % len(tasks)])], number // len(tasks)) for number in range(num)]


def _make_player(source: ExpertSource, options: CollectOptions) -> Callable[[EpisodeJob], Trajectory]:
    return partial(play_episode, source=source, options=options)


def build_parser() -> argparse.ArgumentParser:
    """The command line of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_system.step_discriminator.trajectory_analyzer.collect",
        description="Play tasks with the environment's scripted explorer and record the episodes.",
    )
    parser.add_argument("--out", type=Path, required=True, help="trajectory file to write (JSON Lines)")
    parser.add_argument("--num", type=int, default=200, help="number of episodes (default 200)")
    parser.add_argument("--env", default="alfworld", choices=known_sources(), help="environment (default alfworld)")
    parser.add_argument(
        "--split",
        default="train",
        help="alfworld: train, valid_seen, valid_unseen; webshop: train, val (default train)",
    )
    parser.add_argument(
        "--data-dir", type=Path, help="data folder (default: $ALFWORLD_DATA, then ~/.cache/alfworld; $WEBSHOP_DATA)"
    )
    parser.add_argument(
        "--generate",
        type=int,
        metavar="N",
        help="generate N tasks for the split into --data-dir first (a folder that has none yet)",
    )
    parser.add_argument("--generate-seed", type=int, default=0, help="seed of the generated tasks (default 0)")
    parser.add_argument("--detour-rate", type=float, default=0.3, help="rate of useless steps (default 0.3)")
    parser.add_argument("--error-rate", type=float, default=0.0, help="rate of commands that do nothing (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the expert and of the order of tasks (default 0)")
    parser.add_argument("--max-steps", type=int, help="step limit of an episode (default: alfworld 50, webshop 15)")
    parser.add_argument("--workers", type=int, default=1, help="Ray workers; 1: none, 0: one per core (default 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_program(lambda: _run(args), also=(WorkerLostError,))


def _run(args: argparse.Namespace) -> int:
    options = CollectOptions(args.detour_rate, args.error_rate, args.seed, args.max_steps)
    _check(args.num, options)
    workers = num_workers(args.workers)
    check_output(args.out, "--out")
    source = expert_source(args.env, args.data_dir)
    if args.generate is not None:
        source.generate(args.split, args.generate, args.generate_seed)
    trajectories = collect(source, args.split, args.num, options, workers=workers, show_progress=not args.quiet)
    save_trajectories(args.out, trajectories)
    won = [item for item in trajectories if item.success]
    mean = sum(len(item.steps) for item in won) / len(won) if won else 0.0
    sys.stdout.write(
        f"{len(trajectories)} episodes, {len(won)} won (mean {mean:.1f} steps), "
        f"{len({item.uid for item in trajectories})} tasks -> {args.out}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
