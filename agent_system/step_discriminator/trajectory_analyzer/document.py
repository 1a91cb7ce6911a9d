# SPDX-License-Identifier: Apache-2.0
"""The files of stage 1: `credit_analysis.json`, `credit_summary.csv`, and reading them back."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_system.step_discriminator.trajectory_analyzer.adapters import base_env_name
from agent_system.step_discriminator.trajectory_analyzer.records import (
    ANALYSIS_VERSION,
    KINDS,
    STATUSES,
    CreditOptions,
    CreditRecord,
)
from agent_system.trajectory import Trajectory, task_key
from verl.utils.errors import UserError

__all__ = [
    "SUMMARY_COLUMNS",
    "SummaryRow",
    "build_document",
    "dump_document",
    "load_credit_analysis",
    "one_line",
    "summarise",
    "summary_csv",
    "task_type",
]

SUMMARY_COLUMNS = ("task_type", "n", "mean_length", "mean_evolved_length", "mean_redundancy")


def build_document(
    trajectories: Sequence[Trajectory],
    records: Sequence[CreditRecord],
    options: CreditOptions,
    *,
    versions: Mapping[str, str | None],
    bad_records: Sequence[Mapping[str, Any]],
    timing_file: str,
) -> dict[str, Any]:
    """The content of `credit_analysis.json`.

    `trajectories` and `records` correspond one to one. The document holds nothing that differs between two runs over
    the same input (times are in `timing_file`).
    """
    labelled = [
        _labelled(trajectory, record)
        for trajectory, record in zip(trajectories, records, strict=True)
        if record.status == "labelled"
    ]
    excluded = [
        {"traj_uid": record.traj_uid, "status": record.status, "reason": record.reason}
        for record in records
        if record.status != "labelled"
    ]
    header = {
        "schema_version": ANALYSIS_VERSION,
        "env_names": sorted({base_env_name(trajectory.env_name) for trajectory in trajectories}),
        "versions": dict(sorted(versions.items())),
        "data_hash": _data_hash(trajectories),
        "options": options.as_dict(),
        "counts": _counts(records, len(bad_records)),
        "replays": sum(record.replays for record in records),
        "env_steps_used": sum(record.env_steps_used for record in records),
        "env_steps_naive": sum(record.env_steps_naive for record in records),
        "wall_time": timing_file,
    }
    return {"header": header, "trajectories": labelled, "excluded": excluded, "bad_records": list(bad_records)}


def _labelled(trajectory: Trajectory, record: CreditRecord) -> dict[str, Any]:
    """The trajectory, cut where its replay first succeeded, with the credit fields beside its own."""
    data = trajectory.to_dict()
    total = record.num_steps
    if total < len(trajectory.steps):
        data["final_observation"] = trajectory.steps[total].observation
    credits = record.as_dict()["steps"]
    data["steps"] = [{**step, **credit} for step, credit in zip(data["steps"], credits)]
    data.update(
        status=record.status,
        succeeded=record.succeeded,
        final_score=record.final_score,
        label_source=record.label_source,
        evolved_indices=None if record.evolved_indices is None else list(record.evolved_indices),
        redundancy=record.redundancy,
        redundancy_kinds=record.kinds(),
        replays=record.replays,
        env_steps_used=record.env_steps_used,
        env_steps_naive=record.env_steps_naive,
    )
    return data


def _data_hash(trajectories: Iterable[Trajectory]) -> str:
    """Names the set of tasks, independent of order and of where the data folder lies (16 hex digits)."""
    keys = sorted({task_key(trajectory.task) for trajectory in trajectories})
    return hashlib.blake2b("\n".join(keys).encode("ascii"), digest_size=8).hexdigest()


def _counts(records: Sequence[CreditRecord], num_bad: int) -> dict[str, Any]:
    kinds = dict.fromkeys(KINDS, 0)
    for record in records:
        for kind, number in record.kinds().items():
            kinds[kind] += number
    by_status = {status: sum(record.status == status for record in records) for status in STATUSES}
    return {
        "trajectories": len(records),
        **by_status,
        "bad_records": num_bad,
        "steps": sum(record.num_steps for record in records),
        "redundant_steps": sum(record.num_redundant for record in records),
        "redundant_by_kind": kinds,
    }


def dump_document(document: Mapping[str, Any]) -> str:
    """JSON text with one trajectory per line, ASCII only."""

    def lines(items: Sequence[Any]) -> str:
        return "[" + ",".join("\n" + json.dumps(item, allow_nan=False) for item in items) + ("\n]" if items else "]")

    return (
        '{"header": '
        + json.dumps(document["header"], indent=1, allow_nan=False)
        + ',\n"trajectories": '
        + lines(document["trajectories"])
        + ',\n"excluded": '
        + lines(document["excluded"])
        + ',\n"bad_records": '
        + lines(document["bad_records"])
        + "}\n"
    )


def load_credit_analysis(path: str | Path) -> dict[str, Any]:
    """Read a `credit_analysis.json`.

    Raises:
        UserError: missing, unreadable, not such a file, or of another version.
    """
    source = Path(path).expanduser()
    try:
        document = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the credit analysis {source}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not a credit analysis: it is no valid JSON ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("header"), dict) or "trajectories" not in document:
        raise UserError(f"{source} is not a credit analysis: it has no header and trajectories; make one with analyze.")
    version = document["header"].get("schema_version")
    if version != ANALYSIS_VERSION:
        raise UserError(f"{source} has schema_version {version}, this program reads {ANALYSIS_VERSION}; analyse again.")
    damage = _damage(document)
    if damage is not None:
        raise UserError(f"{source} is damaged: {damage}; analyse again.")
    return document


_Shape = Mapping[str, type | tuple[type, ...]]
_HEADER: _Shape = {
    "env_names": list,
    "data_hash": str,
    "options": dict,
    "counts": dict,
    "replays": int,
    "env_steps_used": int,
    "env_steps_naive": int,
}
_COUNTS: _Shape = dict.fromkeys(("trajectories", *STATUSES, "bad_records", "steps", "redundant_steps"), int)
_TRAJECTORY: _Shape = {
    "task": dict,
    "succeeded": bool,
    "label_source": str,
    "steps": list,
    "evolved_indices": (list, type(None)),
    "redundancy": (int, float),
    "redundancy_kinds": dict,
}
_EXCLUDED: _Shape = {"traj_uid": str, "status": str, "reason": (str, type(None))}


def _damage(document: Mapping[str, Any]) -> str | None:
    """The first field that summaries and reports read and that is missing or of the wrong type; None: all fine."""
    header = document["header"]
    parts: list[tuple[str, Any, _Shape]] = [
        ("header", header, _HEADER),
        ("header.counts", header.get("counts"), _COUNTS),
        ("header.options", header.get("options"), {"mode": str, "label_source": str}),
    ]
    for name, shape in (("trajectories", _TRAJECTORY), ("excluded", _EXCLUDED)):
        items = document.get(name)
        if not isinstance(items, list):
            return f"{name} is not a list"
        parts += [(f"{name}[{index}]", item, shape) for index, item in enumerate(items)]
    for where, item, shape in parts:
        if not isinstance(item, dict):
            return f"{where} is not an object"
        for field, kind in shape.items():
            if not isinstance(item.get(field, ...), kind):
                return f"{where}.{field} is missing or of the wrong type"
        if shape is _TRAJECTORY and not all(isinstance(item["redundancy_kinds"].get(kind), int) for kind in KINDS):
            return f"{where}.redundancy_kinds lacks a number"
    return None


@dataclass(frozen=True)
class SummaryRow:
    """One line of the summary: the labelled trajectories of one task type that succeeded."""

    task_type: str
    n: int
    mean_length: float
    mean_evolved_length: float | None
    mean_redundancy: float
    kinds: Mapping[str, float]
    """Mean number of redundant steps per trajectory, by kind."""


def summarise(trajectories: Sequence[Mapping[str, Any]]) -> list[SummaryRow]:
    """Rows by task type in alphabetic order, then `all`; `trajectories` as in the document."""
    won = [item for item in trajectories if item["succeeded"]]
    types = sorted({task_type(item) for item in won})
    rows = [_row(name, [item for item in won if task_type(item) == name]) for name in types]
    return [*rows, _row("all", won)] if won else []


def task_type(item: Mapping[str, Any]) -> str:
    """Of a trajectory of the document, as `one_line`; `unknown` where the record has none."""
    return one_line(str(item["task"].get("task_type") or "unknown"))


def one_line(text: str) -> str:
    """The text with everything that is not printable escaped (line ends, control characters, half surrogates): what
    outside files call things must not break a table, a terminal or an encoding."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _row(name: str, items: Sequence[Mapping[str, Any]]) -> SummaryRow:
    count = len(items)
    evolved = [len(item["evolved_indices"]) for item in items if item["evolved_indices"] is not None]
    return SummaryRow(
        task_type=name,
        n=count,
        mean_length=sum(len(item["steps"]) for item in items) / count,
        mean_evolved_length=sum(evolved) / len(evolved) if evolved else None,
        mean_redundancy=sum(item["redundancy"] for item in items) / count,
        kinds={kind: sum(item["redundancy_kinds"][kind] for item in items) / count for kind in KINDS},
    )


def summary_csv(rows: Sequence[SummaryRow]) -> str:
    """The text of `credit_summary.csv` (means with four decimals, an unknown one empty)."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(SUMMARY_COLUMNS)
    for row in rows:
        evolved = "" if row.mean_evolved_length is None else f"{row.mean_evolved_length:.4f}"
        table.writerow([row.task_type, row.n, f"{row.mean_length:.4f}", evolved, f"{row.mean_redundancy:.4f}"])
    return text.getvalue()
