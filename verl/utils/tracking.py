# SPDX-License-Identifier: Apache-2.0
"""Metrics to `metrics.jsonl` and, besides, to console, TensorBoard or wandb. Logging never stops a run."""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, SupportsFloat
from urllib.parse import urlparse

import numpy as np

from verl.utils.fs import atomic_write

__all__ = ["BACKENDS", "Tracking", "ValidationGenerationsLogger", "plain_value"]

logger = logging.getLogger(__name__)

BACKENDS = ("console", "tensorboard", "wandb")
METRICS_FILE = "metrics.jsonl"
Sample = tuple[str, str, float]
"""Input text, output text, score."""


def plain_value(value: Any) -> Any:
    """`value` as JSON knows it: NaN and infinities become None, NumPy and torch scalars numbers, the rest text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return [plain_value(item) for item in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            return str(value)
        return number if math.isfinite(number) else None
    return str(value)


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers; truth values count as 0 and 1."""
    return {key: value for key, value in data.items() if isinstance(value, (bool, int, float))}


class Backend(Protocol):
    """One destination. `log` gets plain values (see `plain_value`) and may raise."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the values of one step."""

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        """Show some of a validation's episodes, where the destination has a place for texts."""

    def close(self) -> None:
        """Write out what is pending."""


class _MetricsFile:
    """JSON lines, appended. A part of a line that a killed run left behind is cut off first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_partial_line(path)
        self._handle = path.open("a", encoding="utf-8")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        line = {**data, "step": step}
        self._handle.write(json.dumps(line, allow_nan=False, sort_keys=True) + "\n")
        self._handle.flush()

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        """Whole validation episodes have files of their own."""

    def close(self) -> None:
        self._handle.close()


def _cut_partial_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        logger.warning("%s ended in the middle of a line; the incomplete line is removed.", path)
        atomic_write(path, content[:whole])


class _Console:
    """`step:N - key:value - ...`, numbers only, three decimals."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        parts = [f"step:{step}", *(f"{key}:{value:.3f}" for key, value in _numbers(data).items())]
        sys.stdout.write(" - ".join(parts) + "\n")
        sys.stdout.flush()

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        """Numbers only."""

    def close(self) -> None:
        """Nothing is pending: every line is flushed."""


class _TensorBoard:
    def __init__(self, log_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(log_dir / "tensorboard"))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for key, value in _numbers(data).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        for number, (given, said, score) in enumerate(samples):
            self._writer.add_text(f"val/generations/{number}", f"{given}\n\n---\n\n{said}\n\nscore: {score:g}", step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Online where the user has logged in, offline elsewhere; it never asks. A resumed run keeps its id."""

    def __init__(self, project: str, name: str, log_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = log_dir / "wandb_run_id.txt"
        if not id_file.exists():
            atomic_write(id_file, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=project,
            name=name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(log_dir),
            config=dict(config),
            mode=_wandb_mode(),
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(data), step=step)

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        import wandb

        table = wandb.Table(columns=["step", "input", "output", "score"], data=[[step, *sample] for sample in samples])
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_mode() -> str:
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    try:
        logged_in = netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        logged_in = False
    return "online" if logged_in else "offline"


class Tracking:
    """Metrics of one run.

    `{log_dir}/metrics.jsonl` is always written: one JSON object a line, the keys of `data` and `step`. A resumed run
    appends; where a step occurs twice (logged before a kill, repeated after it) the later line counts. The other
    backends get the same values. A destination that raises, at the start or later, is disabled with one warning.

    Args:
        project_name, experiment_name: names for wandb.
        backends: any of `BACKENDS`; another name is treated like a backend that raises.
        log_dir: folder of the files, created when missing.
        config: plain tree shown by wandb.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: Sequence[str],
        log_dir: str | Path,
        config: Mapping[str, Any],
    ) -> None:
        folder = Path(log_dir).expanduser()
        makers: dict[str, Callable[[], Backend]] = {
            "console": _Console,
            "tensorboard": lambda: _TensorBoard(folder),
            "wandb": lambda: _Wandb(project_name, experiment_name, folder, config),
        }
        self._backends: dict[str, Backend] = {}
        self._open(METRICS_FILE, lambda: _MetricsFile(folder / METRICS_FILE))
        for name in dict.fromkeys(backends):
            if name in makers:
                self._open(name, makers[name])
            else:
                logger.warning("tracker %s does not exist (known: %s); it is left out.", name, ", ".join(BACKENDS))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record `data` (any values, see `plain_value`) for `step`."""
        plain = {str(key): plain_value(value) for key, value in data.items()}
        for name, backend in list(self._backends.items()):
            try:
                backend.log(plain, int(step))
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
                self._disable(name, error)

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        """Show episodes of a validation as a table (wandb) or texts (TensorBoard); other destinations have no place."""
        if not samples:
            return
        for name, backend in list(self._backends.items()):
            try:
                backend.log_generations(samples, int(step))
            except Exception as error:  # noqa: BLE001 - as in log
                self._disable(name, error)

    def close(self) -> None:
        """Close every destination; may be called twice."""
        for name, backend in list(self._backends.items()):
            try:
                backend.close()
            except Exception as error:  # noqa: BLE001 - as in log
                logger.warning("tracker %s failed while closing: %s: %s", name, type(error).__name__, error)
        self._backends.clear()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, name: str, make: Callable[[], Backend]) -> None:
        try:
            self._backends[name] = make()
        except Exception as error:  # noqa: BLE001 - as in log
            self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        self._backends.pop(name, None)
        logger.warning("tracker %s is disabled, the run goes on: %s: %s", name, type(error).__name__, error)


class ValidationGenerationsLogger:
    """Not part of this version: :meth:`Tracking.log_generations` does this for every backend of the run."""

    def __init__(self) -> None:
        raise NotImplementedError(
            "ValidationGenerationsLogger: the run's own trackers show validation episodes, see "
            "Tracking.log_generations and trainer.log_val_generations"
        )
