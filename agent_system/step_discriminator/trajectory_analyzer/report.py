# SPDX-License-Identifier: Apache-2.0
"""Stage 1 report: a credit analysis as a table per task type, on the terminal and as markdown.

python -m agent_system.step_discriminator.trajectory_analyzer.report out/credit_analysis.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_system.programs import check_output, run_program
from agent_system.step_discriminator.trajectory_analyzer.document import SummaryRow, load_credit_analysis, summarise
from agent_system.step_discriminator.trajectory_analyzer.records import KINDS
from verl.utils.fs import atomic_write

__all__ = ["main", "markdown_report", "text_table"]

REPORT_FILE = "credit_report.md"

_TITLES = ("task type", "n", "length", "evolved", "redundancy", *(kind.replace("_", " ") for kind in KINDS))


def _cells(row: SummaryRow) -> list[str]:
    evolved = "-" if row.mean_evolved_length is None else f"{row.mean_evolved_length:.1f}"
    kinds = [f"{row.kinds[kind]:.2f}" for kind in KINDS]
    return [row.task_type, str(row.n), f"{row.mean_length:.1f}", evolved, f"{row.mean_redundancy:.3f}", *kinds]


def text_table(rows: Sequence[SummaryRow]) -> str:
    """Aligned columns: mean length, mean evolved length, mean redundancy, redundant steps per trajectory by kind."""
    table = [list(_TITLES), *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_TITLES))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths)) for line in table)
    ]
    lines.insert(1, "-" * len(lines[0]))
    if not rows:
        lines.append("(no success was labelled)")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def markdown_report(document: Mapping[str, Any]) -> str:
    """The whole report: what was analysed, what it cost, and the table."""
    header = document["header"]
    counts = header["counts"]
    rows = summarise(document["trajectories"])
    lines = [
        "# Credit analysis",
        "",
        f"{', '.join(header['env_names'])}, mode `{header['options']['mode']}`, tasks `{header['data_hash']}`.",
        "",
        f"{counts['trajectories']} trajectories: {counts['labelled']} labelled, {counts['failed']} failed, "
        f"{counts['not_reproducible']} not reproducible, {counts['unreadable_game']} without a readable game; "
        f"{counts['bad_records']} broken records. {counts['redundant_steps']} of {counts['steps']} steps are "
        "redundant.",
        "",
        f"{header['replays']} replays took {header['env_steps_used']} environment steps; each from the start they "
        f"would have taken {header['env_steps_naive']}.",
        "",
        "Means per successful trajectory; the last four columns count redundant steps by kind.",
        "",
        "| " + " | ".join(_TITLES) + " |",
        "|---|" + "---:|" * (len(_TITLES) - 1),
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
        "",
        *(f"* left out: `{item['traj_uid']}` {item['status']}: {item['reason']}" for item in _named(document)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _named(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Excluded trajectories worth a line each; plain failures are only counted."""
    return [item for item in document["excluded"] if item["status"] != "failed"]


def build_parser() -> argparse.ArgumentParser:
    """The command line of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_system.step_discriminator.trajectory_analyzer.report",
        description="Print a credit analysis as a table per task type and write it as markdown.",
    )
    parser.add_argument("analysis", type=Path, help="a credit_analysis.json")
    parser.add_argument("--out", type=Path, help=f"markdown file (default: {REPORT_FILE} beside the analysis)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    args = build_parser().parse_args(argv)
    return run_program(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    document = load_credit_analysis(args.analysis)
    out = check_output(args.out or args.analysis.parent / REPORT_FILE, "--out")
    atomic_write(out, markdown_report(document))
    sys.stdout.write(text_table(summarise(document["trajectories"])) + f"\n-> {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
