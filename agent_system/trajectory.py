# SPDX-License-Identifier: Apache-2.0
"""Whole episodes as records, and their JSON Lines files.

One line is one episode. Loading checks every field: a line that does not fit is left out, and the report names its
line, its field and the reason. Unknown fields do not fit either; a change of the format changes `SCHEMA_VERSION`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

__all__ = [
    "SCHEMA_VERSION",
    "BadRecord",
    "LoadReport",
    "RecordError",
    "Step",
    "Trajectory",
    "append_trajectories",
    "load_trajectories",
    "save_trajectories",
    "task_key",
]

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1


class RecordError(ValueError):
    """A record that does not fit the schema; `field_name` says where ("steps[3].reward"), `reason` why."""

    def __init__(self, field_name: str, reason: str) -> None:
        super().__init__(f"{field_name}: {reason}")
        self.field_name = field_name
        self.reason = reason


@dataclass(frozen=True)
class Step:
    """One turn. `observation` and `admissible_actions` are what was seen *before* `action`."""

    step_index: int
    observation: str
    admissible_actions: tuple[str, ...]
    response: str | None
    """Raw model text; None for an actor that does not write any."""
    action: str
    """As sent to the environment."""
    is_action_valid: bool
    reward: float
    done: bool
    state_key: str
    """Hash of the environment's facts before the action, equal across processes."""
    expert_kind: str | None = None
    """plan, detour or mistake for a scripted expert's steps."""


@dataclass(frozen=True)
class Trajectory:
    """One episode."""

    schema_version: int
    traj_uid: str
    uid: str
    """Group: episodes of one group start from the same task."""
    env_name: str
    task: dict[str, Any]
    """What rebuilds the environment (ALFWorld: `gamefile` relative to the data folder, `sha256`), instruction, type."""
    policy: dict[str, Any]
    """Who acted: kind, model, sampling, seed."""
    success: bool
    episode_reward: float
    task_score: float | None
    """The environment's own score in [0, 1], where it has one."""
    truncated: bool
    """The episode ended at the step limit, not by the environment."""
    steps: tuple[Step, ...]
    final_observation: str = ""
    """Seen after the last action."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in field order."""
        return dataclasses.asdict(self)

    def to_line(self) -> str:
        """One line of a trajectory file, without the line end."""
        # ASCII only: escaped surrogates and line separators survive every reader.
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        """Check and convert one decoded record.

        Raises:
            RecordError: names the first field that does not fit.
        """
        version = _get(data, "schema_version", int, "")
        if version != SCHEMA_VERSION:
            _fail("schema_version", f"is {version}, this program reads {SCHEMA_VERSION}")
        _no_unknown(data, cls, "")
        raw_steps = _get(data, "steps", list, "")
        score = data.get("task_score", _MISSING)
        return cls(
            schema_version=version,
            traj_uid=_get(data, "traj_uid", str, ""),
            uid=_get(data, "uid", str, ""),
            env_name=_get(data, "env_name", str, ""),
            task=_free(data, "task"),
            policy=_free(data, "policy"),
            success=_get(data, "success", bool, ""),
            episode_reward=_get(data, "episode_reward", float, ""),
            task_score=None if score is None else _get(data, "task_score", float, ""),
            truncated=_get(data, "truncated", bool, ""),
            steps=tuple(_step(raw, index) for index, raw in enumerate(raw_steps)),
            final_observation=_get(data, "final_observation", str, ""),
        )


@dataclass(frozen=True)
class BadRecord:
    """A line that was left out. `line` counts from 1; `field` is empty when the line is no JSON object at all."""

    line: int
    field: str
    reason: str

    def __iter__(self) -> Any:
        return iter((self.line, self.field, self.reason))


@dataclass
class LoadReport:
    """What loading a file found."""

    path: Path
    num_loaded: int = 0
    bad: list[BadRecord] = field(default_factory=list)

    def messages(self) -> list[str]:
        """One sentence per bad record: file, line, field, reason."""
        return [
            f"{self.path}, line {bad.line}{f', field {bad.field}' if bad.field else ''}: {bad.reason}"
            for bad in self.bad
        ]


_MISSING = object()
_MAX_DEPTH = 32
_KIND_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _fail(name: str, reason: str) -> NoReturn:
    raise RecordError(name, reason)


def _get(data: Mapping[str, Any], name: str, kind: type, prefix: str) -> Any:
    value = data.get(name, _MISSING)
    where = prefix + name
    if value is _MISSING:
        _fail(where, "is missing")
    # bool is an int in Python, but not here.
    ok = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not ok:
        _fail(where, f"must be {_KIND_NAMES[kind]}, got {json.dumps(value)[:60]}")
    if kind is float:
        # An integer beyond the float range is as unusable as an infinity.
        if (isinstance(value, int) and abs(value) > 2**53) or not math.isfinite(value):
            _fail(where, "must be a finite number")
        return float(value)
    return value


def _free(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of any content that can be written again: finite numbers, and no bottomless nesting."""
    root: dict[str, Any] = _get(data, name, dict, "")
    pending: list[tuple[str, Any, int]] = [(name, root, 0)]
    while pending:
        where, value, depth = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            _fail(where, "must be a finite number")
        if depth > _MAX_DEPTH:
            _fail(name, "is nested too deeply")
        if isinstance(value, dict):
            pending += [(f"{where}.{key}", item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    return root


def _no_unknown(data: Mapping[str, Any], cls: type, prefix: str) -> None:
    known = {item.name for item in dataclasses.fields(cls)}
    for name in data:
        if name not in known:
            _fail(prefix + name, "is not a known field")


def _optional_text(data: Mapping[str, Any], name: str, prefix: str) -> str | None:
    if data.get(name, _MISSING) is None:
        return None
    value: str = _get(data, name, str, prefix)
    return value


def _step(raw: Any, index: int) -> Step:
    where = f"steps[{index}]"
    if not isinstance(raw, dict):
        _fail(where, "must be an object")
    prefix = where + "."
    _no_unknown(raw, Step, prefix)
    if _get(raw, "step_index", int, prefix) != index:
        _fail(prefix + "step_index", f"is {raw['step_index']}, expected {index}: steps count from 0 without gaps")
    admissible = _get(raw, "admissible_actions", list, prefix)
    for i, command in enumerate(admissible):
        if not isinstance(command, str):
            _fail(f"{prefix}admissible_actions[{i}]", "must be a string")
    return Step(
        step_index=index,
        observation=_get(raw, "observation", str, prefix),
        admissible_actions=tuple(admissible),
        response=_optional_text(raw, "response", prefix),
        action=_get(raw, "action", str, prefix),
        is_action_valid=_get(raw, "is_action_valid", bool, prefix),
        reward=_get(raw, "reward", float, prefix),
        done=_get(raw, "done", bool, prefix),
        state_key=_get(raw, "state_key", str, prefix),
        expert_kind=_optional_text(raw, "expert_kind", prefix) if "expert_kind" in raw else None,
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_line(line: bytes) -> Trajectory:
    try:
        data = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RecordError("", f"is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise RecordError("", f"is not valid JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:
        raise RecordError("", f"is not valid JSON ({error})") from error
    except RecursionError as error:
        raise RecordError("", "is nested too deeply") from error
    if not isinstance(data, dict):
        raise RecordError("", "is not a JSON object")
    return Trajectory.from_dict(data)


def load_trajectories(path: str | Path) -> tuple[list[Trajectory], LoadReport]:
    """Read a trajectory file; blank lines are skipped, broken lines are left out, counted and logged.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    source = Path(path).expanduser()
    report = LoadReport(source)
    loaded: list[Trajectory] = []
    try:
        with source.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                try:
                    loaded.append(_parse_line(line))
                except RecordError as error:
                    report.bad.append(BadRecord(number, error.field_name, error.reason))
    except OSError as error:
        raise UserError(f"cannot read the trajectory file {source}: {error.strerror or error}") from error
    report.num_loaded = len(loaded)
    for message in report.messages():
        logger.warning("record left out: %s", message)
    return loaded, report


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a whole file (or nothing): one line per episode."""
    atomic_write(path, "".join(trajectory.to_line() + "\n" for trajectory in trajectories))


def append_trajectories(path: str | Path, trajectories: Sequence[Trajectory]) -> None:
    """Add episodes to the end of a file, in one write.

    A half-written last line (an earlier process was killed) stays a broken line of its own and spoils nothing else.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    payload = "".join(trajectory.to_line() + "\n" for trajectory in trajectories).encode("ascii")
    with target.open("ab+") as handle:
        if handle.seek(0, os.SEEK_END) > 0:
            handle.seek(-1, os.SEEK_END)
            if handle.read(1) != b"\n":
                payload = b"\n" + payload
        handle.write(payload)
        handle.flush()
        os.fsync(handle.fileno())


def task_key(task: Mapping[str, Any]) -> str:
    """Stable name of a task, equal across processes: hash of its JSON form with sorted keys (16 hex digits)."""
    text = json.dumps(task, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=8).hexdigest()
