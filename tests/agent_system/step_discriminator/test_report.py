# SPDX-License-Identifier: Apache-2.0
"""The report and the summary of an analysis: table, plot, CSV, and names from outside files in all of them."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
from toy_credit_game import ToyGame, toy_reveals, toy_trajectories

from agent_system.step_discriminator.trajectory_analyzer import EnvAdapter, load_credit_analysis, report
from agent_system.step_discriminator.trajectory_analyzer import analyze as program
from agent_system.trajectory import save_trajectories


def analyze(folder: Path, task_type: str = "put", **options: object) -> Path:
    """An analysis of 40 toy episodes of a task type; its file."""
    episodes = [dataclasses.replace(item, task={**item.task, "task_type": task_type}) for item in toy_trajectories(40)]
    save_trajectories(folder / "t.jsonl", episodes)
    program.analyze(
        [folder / "t.jsonl"],
        folder / "out",
        options=program.CreditOptions(**options),
        adapter_for=lambda name, data_dir: EnvAdapter(make_game=ToyGame, reveals=toy_reveals),
    )
    return folder / "out" / program.ANALYSIS_FILE


def rows_of(analysis: Path) -> list[dict[str, str]]:
    with (analysis.parent / program.SUMMARY_FILE).open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_table_and_plot(tmp_path, capsys):
    analysis = analyze(tmp_path, mode="minimal")
    assert report.main([str(analysis)]) == 0
    text = (analysis.parent / report.REPORT_FILE).read_text()
    assert "| put |" in text and "| all |" in text and f"({report.PLOT_FILE})" in text and "mode `minimal`" in text
    picture = (analysis.parent / report.PLOT_FILE).read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 5000
    again = report.plot_lengths(load_credit_analysis(analysis)["trajectories"])
    assert again == picture
    assert "put" in capsys.readouterr().out


def test_no_plot_without_evolved_trajectories(tmp_path, capsys):
    analysis = analyze(tmp_path, evolve=False)
    assert report.main([str(analysis)]) == 0
    assert "no plot" in capsys.readouterr().err and not (analysis.parent / report.PLOT_FILE).exists()
    assert report.main([str(tmp_path / "nothing.json")]) == 2


def test_summary_csv(tmp_path):
    analysis = analyze(tmp_path)
    items, rows = load_credit_analysis(analysis)["trajectories"], rows_of(analysis)
    assert [row["task_type"] for row in rows] == ["put", "all"]
    assert int(rows[-1]["n"]) == len(items)
    mean = sum(len(item["steps"]) for item in items) / len(items)
    assert float(rows[-1]["mean_length"]) == pytest.approx(mean, abs=1e-4)
    assert float(rows[-1]["mean_evolved_length"]) < mean


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a,b", "a,b"),
        ('say "put"', 'say "put"'),
        ("two\nlines\r", r"two\nlines\r"),
        ("half a pair \ud83d", r"half a pair \ud83d"),
        ("\x1b[31mred\x00", r"\x1b[31mred\x00"),
        (r"$\frac{$", r"$\frac{$"),
        ("a|b", "a|b"),
        ("\u6211", "\u6211"),
    ],
)
@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_from_outside_break_no_table(name, shown, tmp_path, capsys):
    analysis = analyze(tmp_path, name)
    assert [row["task_type"] for row in rows_of(analysis)] == [shown, "all"]
    assert all(None not in row and len(row) == len(rows_of(analysis)[0]) for row in rows_of(analysis))
    assert report.main([str(analysis)]) == 0
    assert shown in capsys.readouterr().out
    table = [line for line in (analysis.parent / report.REPORT_FILE).read_text("utf-8").splitlines() if "| " in line]
    assert len(table) == 3 and shown.replace("|", r"\|") in table[1]
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1
    assert (analysis.parent / report.PLOT_FILE).is_file()


def test_reasons_from_outside_break_no_report(tmp_path):
    document = load_credit_analysis(analyze(tmp_path))
    document["excluded"] = [{"traj_uid": "x\n# head\ud800", "status": "unreadable_game", "reason": "a\nb"}]
    text = report.markdown_report(document)
    assert text.encode("utf-8").splitlines()[-1] == rb"* left out: `x\n# head\ud800` unreadable_game: a\nb"
