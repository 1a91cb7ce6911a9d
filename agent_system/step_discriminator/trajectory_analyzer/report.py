# SPDX-License-Identifier: Apache-2.0
"""Stage 1 report: a credit analysis as a table per task type, on the terminal and as markdown, and as a plot.

python -m agent_system.step_discriminator.trajectory_analyzer.report out/credit_analysis.json
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_system.programs import check_output, run_program
from agent_system.step_discriminator.trajectory_analyzer.document import (
    SummaryRow,
    load_credit_analysis,
    one_line,
    summarise,
    task_type,
)
from agent_system.step_discriminator.trajectory_analyzer.records import KINDS
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

__all__ = ["PLOT_FILE", "REPORT_FILE", "main", "markdown_report", "plot_lengths", "text_table"]

REPORT_FILE = "credit_report.md"
PLOT_FILE = "credit_lengths.png"

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


def markdown_report(document: Mapping[str, Any], *, plot: Path | None = None) -> str:
    """The whole report: what was analysed, what it cost, the table, and the plot beside it."""
    header = document["header"]
    counts = header["counts"]
    rows = summarise(document["trajectories"])
    lines = [
        "# Credit analysis",
        "",
        f"{', '.join(header['env_names'])}, mode `{header['options']['mode']}`, credit by "
        f"`{header['options']['label_source']}`, tasks `{header['data_hash']}`.",
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
        *("| " + " | ".join(cell.replace("|", r"\|") for cell in _cells(row)) + " |" for row in rows),
        "",
        *(() if plot is None else (f"![length against evolved length]({plot.name})", "")),
        *(f"* left out: `{item['traj_uid']}` {item['status']}: {item['reason']}" for item in _named(document)),
    ]
    return "\n".join(map(one_line, lines)).rstrip() + "\n"


def plot_lengths(trajectories: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG: every success as a point, its length against that of its evolved trajectory, coloured by task type.

    Points on the diagonal had nothing to lose. Equal points are one, the larger the more trajectories it is.
    """
    from matplotlib.figure import Figure

    counts: dict[str, Counter[tuple[int, int]]] = {}
    for item in trajectories:
        if item["succeeded"] and item["evolved_indices"] is not None:
            point = (len(item["steps"]), len(item["evolved_indices"]))
            counts.setdefault(task_type(item), Counter())[point] += 1
    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    axes = figure.subplots()
    places = [place for points in counts.values() for place in points]
    longest, tallest = (max((place[side] for place in places), default=1) for side in (0, 1))
    axes.plot([0, longest], [0, longest], color="0.7", linewidth=1.0, label="nothing removed")
    for number, (name, points) in enumerate(sorted(counts.items())):
        places = sorted(points)
        axes.scatter(
            [length for length, _ in places],
            [evolved for _, evolved in places],
            s=[18.0 * points[place] ** 0.5 for place in places],
            marker="os^vDP"[number % 6],
            alpha=0.6,
            label=f"{name} ({points.total()})",
        )
    axes.set(
        xlabel="steps", ylabel="steps of the evolved trajectory", xlim=(0, 1.05 * longest), ylim=(0, 1.2 * tallest)
    )
    for label in figure.legend(fontsize="small", loc="outside right upper").get_texts():
        label.set_parse_math(False)  # names of tasks are no formulas
    buffer = io.BytesIO()
    # Without the version of the library, so that equal analyses give equal files.
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _named(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Excluded trajectories worth a line each; plain failures are only counted."""
    return [item for item in document["excluded"] if item["status"] != "failed"]


def build_parser() -> argparse.ArgumentParser:
    """The command line of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_system.step_discriminator.trajectory_analyzer.report",
        description="Print a credit analysis as a table per task type, write it as markdown, and plot the length of "
        "every success against that of its evolved trajectory.",
        epilog="Exit status: 0; 2 with one line on stderr when nothing was written.",
    )
    parser.add_argument("analysis", type=Path, help="a credit_analysis.json")
    parser.add_argument("--out", type=Path, help=f"markdown file (default: {REPORT_FILE} beside the analysis)")
    parser.add_argument("--plot", type=Path, help=f"PNG file (default: {PLOT_FILE} beside the report)")
    parser.add_argument("--no-plot", action="store_true", help="write no plot (it needs matplotlib)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    args = build_parser().parse_args(argv)
    return run_program(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    document = load_credit_analysis(args.analysis)
    trajectories = document["trajectories"]
    out = check_output(args.out or args.analysis.parent / REPORT_FILE, "--out")
    plot = None if args.no_plot else check_output(args.plot or out.parent / PLOT_FILE, "--plot")
    if plot is not None and not any(item["evolved_indices"] for item in trajectories):
        sys.stderr.write("this analysis has no evolved trajectory (no success, or --no-evolve): no plot\n")
        plot = None
    if plot is not None:
        atomic_write(plot, _plot(trajectories))
    atomic_write(out, markdown_report(document, plot=plot))
    sys.stdout.write(text_table(summarise(trajectories)))
    sys.stdout.write("\n" + "".join(f"-> {path}\n" for path in (out, plot) if path is not None))
    return 0


def _plot(trajectories: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        return plot_lengths(trajectories)
    except ModuleNotFoundError as error:
        raise UserError(f"the plot needs {error.name}, which is not installed; install it or add --no-plot") from error


if __name__ == "__main__":
    sys.exit(main())
