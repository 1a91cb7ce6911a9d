# SPDX-License-Identifier: Apache-2.0
"""Stage 1: trajectories.jsonl -> credit_analysis.json and credit_summary.csv.

    python -m agent_system.step_discriminator.trajectory_analyzer.analyze trajectories.jsonl --out-dir out

Every step of every successful trajectory is deleted once and the rest replayed: if it still succeeds, the step was
redundant. `--mode minimal` also searches a success from which nothing more can be removed. Finished trajectories are
kept in a journal beside the output; a run that was interrupted continues there and ends with the same bytes. Exit
status: 0; 1 when the output is complete but lines of the input were broken or games could not be read (each is named);
2 when nothing was written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agent_system.programs import check_output, run_program
from agent_system.step_discriminator.trajectory_analyzer.adapters import EnvAdapter, base_env_name, get_adapter
from agent_system.step_discriminator.trajectory_analyzer.document import (
    build_document,
    dump_document,
    summarise,
    summary_csv,
)
from agent_system.step_discriminator.trajectory_analyzer.journal import Journal, job_key
from agent_system.step_discriminator.trajectory_analyzer.label import TrajectoryJob, label_job
from agent_system.step_discriminator.trajectory_analyzer.parallel import WorkerLostError, num_workers, run_jobs
from agent_system.step_discriminator.trajectory_analyzer.progress import progress_bar
from agent_system.step_discriminator.trajectory_analyzer.records import MODES, CreditOptions, CreditRecord
from agent_system.trajectory import Trajectory, load_trajectories
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

__all__ = [
    "ANALYSIS_FILE",
    "JOURNAL_FILE",
    "SUMMARY_FILE",
    "TIMING_FILE",
    "AnalysisResult",
    "analyze",
    "main",
    "run_labelling",
]

logger = logging.getLogger(__name__)

ANALYSIS_FILE = "credit_analysis.json"
SUMMARY_FILE = "credit_summary.csv"
TIMING_FILE = "credit_analysis.timing.json"
JOURNAL_FILE = "credit_analysis.journal.jsonl"


@dataclass(frozen=True)
class AnalysisResult:
    """What `analyze` wrote."""

    out_dir: Path
    header: Mapping[str, Any]
    resumed: int
    """Trajectories taken from the journal of an interrupted run."""
    wall_time_s: float

    @property
    def num_problems(self) -> int:
        """Broken lines of the input and games that could not be read."""
        counts = self.header["counts"]
        return int(counts["bad_records"]) + int(counts["unreadable_game"])


def analyze(
    sources: Sequence[str | Path],
    out_dir: str | Path,
    *,
    options: CreditOptions | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    show_progress: bool = False,
    adapter_for: Callable[[str, Path | None], EnvAdapter] = get_adapter,
) -> AnalysisResult:
    """Analyse trajectory files and write the four files of `out_dir` (each whole or not at all).

    Args:
        sources: JSON Lines files; their order is the order of the output.
        out_dir: created when missing.
        options: defaults to the paper's single-step ablation.
        data_dir: the environment's data folder; None for its default.
        workers: Ray actors; 1 works here without Ray. The output does not depend on it.
        show_progress: a bar on stderr.
        adapter_for: (env_name, data folder) -> adapter.

    Raises:
        UserError: nothing to analyse, an unknown environment, no data, or none of the games can be read.
        WorkerLostError: a trajectory killed its worker again and again; what is finished stays in the journal.
    """
    chosen = CreditOptions() if options is None else options
    started = time.monotonic()
    trajectories, bad = _load(sources)
    adapters = {
        base_env_name(name): adapter_for(name, None if data_dir is None else Path(data_dir))
        for name in sorted({item.env_name for item in trajectories})
    }
    target = Path(out_dir).expanduser()
    with Journal(target / JOURNAL_FILE) as journal:
        records, resumed = _label_all(trajectories, adapters, chosen, journal, workers, show_progress)
        _refuse_if_no_game(records)
        document = build_document(
            trajectories,
            records,
            chosen,
            versions={key: value for item in adapters.values() for key, value in (item.versions or {}).items()},
            bad_records=bad,
            timing_file=TIMING_FILE,
        )
        seconds = time.monotonic() - started
        atomic_write(target / SUMMARY_FILE, summary_csv(summarise(document["trajectories"])))
        atomic_write(target / TIMING_FILE, _timing(document["header"], seconds, resumed, workers))
        # Last, so that its presence means that the other files belong to it.
        atomic_write(target / ANALYSIS_FILE, dump_document(document))
        journal.remove()
    return AnalysisResult(target, document["header"], resumed, seconds)


def _load(sources: Sequence[str | Path]) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """All readable trajectories in order; broken lines and repeated ids are listed and left out."""
    trajectories: list[Trajectory] = []
    bad: list[dict[str, Any]] = []
    seen: set[str] = set()
    for source in sources:
        loaded, report = load_trajectories(source)
        name = Path(source).name
        bad += [{"file": name, "line": item.line, "field": item.field, "reason": item.reason} for item in report.bad]
        for trajectory in loaded:
            if trajectory.traj_uid in seen:
                reason = f"{trajectory.traj_uid} is there already"
                logger.warning("record left out: %s, field traj_uid: %s", source, reason)
                bad.append({"file": name, "line": None, "field": "traj_uid", "reason": reason})
                continue
            seen.add(trajectory.traj_uid)
            trajectories.append(trajectory)
    if not trajectories:
        names = ", ".join(str(source) for source in sources)
        raise UserError(f"no readable trajectory in {names}; collect some with trajectory_analyzer.collect.")
    return trajectories, bad


def _label_all(
    trajectories: Sequence[Trajectory],
    adapters: Mapping[str, EnvAdapter],
    options: CreditOptions,
    journal: Journal,
    workers: int,
    show_progress: bool,
) -> tuple[list[CreditRecord], int]:
    keys = [job_key(TrajectoryJob.of(item), options) for item in trajectories]
    records: dict[int, CreditRecord] = {}
    for index, key in enumerate(keys):
        known = journal.get(key)
        if known is not None:
            records[index] = known
    resumed = len(records)
    if resumed:
        logger.info("continuing an interrupted analysis: %d of %d trajectories are done", resumed, len(keys))
    pending = [index for index in range(len(keys)) if index not in records]
    results = run_labelling([trajectories[index] for index in pending], adapters, options, workers)
    with progress_bar("credit analysis", total=len(keys), initial=resumed, show=show_progress) as advance:
        for position, record in results:
            index = pending[position]
            records[index] = record
            # An unreadable game is looked at again next time: the user may have put it right.
            if record.status != "unreadable_game":
                journal.add(keys[index], record)
            else:
                logger.warning("%s: left out: %s", record.traj_uid, record.reason)
            advance(1)
    return [records[index] for index in range(len(keys))], resumed


def run_labelling(
    trajectories: Sequence[Trajectory], adapters: Mapping[str, EnvAdapter], options: CreditOptions, workers: int
) -> Iterator[tuple[int, CreditRecord]]:
    """Yield (index of the trajectory, record) as they are finished; see `run_jobs` for workers.

    Args:
        adapters: by `base_env_name`.

    Raises:
        WorkerLostError: a trajectory killed its worker again and again.
    """
    jobs = [(base_env_name(item.env_name), TrajectoryJob.of(item)) for item in trajectories]
    return run_jobs(jobs, partial(_make_handler, dict(adapters), options), workers=workers, describe=_describe)


def _describe(job: tuple[str, TrajectoryJob]) -> str:
    return f"trajectory {job[1].traj_uid}"


def _make_handler(
    adapters: Mapping[str, EnvAdapter], options: CreditOptions
) -> Callable[[tuple[str, TrajectoryJob]], CreditRecord]:
    def handle(item: tuple[str, TrajectoryJob]) -> CreditRecord:
        return label_job(item[1], adapters[item[0]], options)

    return handle


def _refuse_if_no_game(records: Sequence[CreditRecord]) -> None:
    unreadable = [record for record in records if record.status == "unreadable_game"]
    tried = [record for record in records if record.status != "failed"]
    if unreadable and len(unreadable) == len(tried):
        raise UserError(f"none of the {len(tried)} games could be read. The first: {unreadable[0].reason}")


def _timing(header: Mapping[str, Any], seconds: float, resumed: int, workers: int) -> str:
    analysed = int(header["counts"]["trajectories"]) - resumed
    data = {
        "wall_time_s": round(seconds, 4),
        "trajectories_analysed": analysed,
        "trajectories_resumed": resumed,
        "workers": workers,
        "trajectories_per_s": round(analysed / seconds, 2) if seconds > 0 else None,
    }
    return json.dumps(data, indent=1) + "\n"


def build_parser() -> argparse.ArgumentParser:
    """The command line of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_system.step_discriminator.trajectory_analyzer.analyze",
        description="Hindsight credit analysis: label every step of successful trajectories necessary or redundant.",
        epilog=f"Writes {ANALYSIS_FILE}, {SUMMARY_FILE} and {TIMING_FILE}. An interrupted run continues when started "
        "again with the same arguments. Exit status 1: complete, but some lines or games were unreadable; 2: nothing "
        "was written.",
    )
    parser.add_argument("trajectories", nargs="+", type=Path, help="trajectory files (JSON Lines)")
    parser.add_argument("--out-dir", type=Path, required=True, help="folder of the output files")
    parser.add_argument("--data-dir", type=Path, help="data folder of the environment (default: the environment's own)")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first: a module that registers the adapter of your own environment (may be repeated)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="single",
        help="single: delete every step alone (default); minimal: also look for a verified success from which no step, "
        "no pair and no run of steps can be removed",
    )
    parser.add_argument(
        "--label-source",
        choices=MODES,
        default="single",
        help="which label becomes `credit`: single (necessary alone, default) or minimal (kept by --mode minimal)",
    )
    parser.add_argument("--label-failed", action="store_true", help="label failed trajectories too (default: skip)")
    parser.add_argument(
        "--no-evolve",
        action="store_true",
        help="with --mode single: do not look for a shorter verified success",
    )
    parser.add_argument(
        "--success-threshold",
        type=float,
        default=1.0,
        metavar="SCORE",
        help="score in (0, 1] from which on an episode succeeds (default 1.0: solved); below 1, redundant means that "
        "the final score does not fall",
    )
    parser.add_argument("--workers", type=int, default=1, help="Ray workers; 1: none, 0: one per core (default 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_program(
        lambda: _run(args),
        also=(WorkerLostError,),
        on_interrupt=f"the same command continues from {args.out_dir / JOURNAL_FILE}",
    )


def _run(args: argparse.Namespace) -> int:
    for module in args.modules:
        _import(module)
    result = analyze(
        args.trajectories,
        check_output(args.out_dir, "--out-dir", folder=True),
        options=CreditOptions(
            mode=args.mode,
            label_source=args.label_source,
            label_failed=args.label_failed,
            evolve=not args.no_evolve,
            success_threshold=args.success_threshold,
        ),
        data_dir=args.data_dir,
        workers=num_workers(args.workers),
        show_progress=not args.quiet,
    )
    sys.stdout.write(describe_result(result))
    if not result.header["counts"]["labelled"]:
        sys.stderr.write("nothing was labelled: only a success that replays can be; collect some of those first\n")
    if result.num_problems:
        sys.stderr.write(
            f"error: {result.num_problems} broken lines or unreadable games were left out (named above and in "
            f"{result.out_dir / ANALYSIS_FILE}); the other trajectories are complete.\n"
        )
        return 1
    return 0


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise UserError(f"--import {module}: no module {error.name!r} can be imported; check PYTHONPATH.") from error


def describe_result(result: AnalysisResult) -> str:
    """Two lines for a terminal."""
    header = result.header
    counts = header["counts"]
    return (
        f"{counts['labelled']} trajectories labelled, {counts['failed']} failed, {counts['not_reproducible']} not "
        f"reproducible, {counts['unreadable_game']} without a readable game, {counts['bad_records']} broken lines; "
        f"{counts['redundant_steps']} of {counts['steps']} steps redundant\n"
        f"{header['replays']} replays in {header['env_steps_used']} environment steps (naively "
        f"{header['env_steps_naive']}), {result.wall_time_s:.1f} s -> {result.out_dir / ANALYSIS_FILE}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
