# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of the quickstart one after the other, each with a log file and a line of progress."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

logger = logging.getLogger(__name__)

_STEP = re.compile(r"\bstep[: ]+(\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Phase:
    """One program of the pipeline.

    name: short, also the name of its log file. title: shown to the user. command: argument vector.
    env: environment variables on top of the caller's. total_steps: optimizer or training steps, for the progress line.
    done: file or folder whose presence proves that the phase finished; every program writes it whole or not at all.
    """

    name: str
    title: str
    command: Sequence[str]
    done: Path
    env: Mapping[str, str] = field(default_factory=dict)
    total_steps: int | None = None


class PhaseRunner:
    """Runs phases; remembers which ones are finished in `{out}/phases.json`."""

    def __init__(self, out: Path, num_phases: int) -> None:
        self.out = out
        self.num_phases = num_phases
        self.seconds: dict[str, float] = {}
        self._state = out / "phases.json"
        self._count = 0
        if self._state.is_file():
            self.seconds = dict(json.loads(self._state.read_text(encoding="utf-8")))

    def run(self, phase: Phase) -> None:
        """Run one phase unless it is finished already.

        Raises:
            UserError: the program failed; names the log file and shows its last lines.
        """
        self._count += 1
        head = f"[{self._count}/{self.num_phases}] {phase.title}"
        if phase.name in self.seconds and phase.done.exists():
            _say(f"{head}: done before ({self.seconds[phase.name]:.0f} s)")
            return
        log = self.out / "logs" / f"{phase.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        code, tail = self._stream(phase, head, log)
        elapsed = time.monotonic() - started
        if code != 0:
            raise UserError(
                f"the phase {phase.name!r} ended with status {code}; its log is {log}. Last lines:\n" + "\n".join(tail)
            )
        if not phase.done.exists():
            raise UserError(f"the phase {phase.name!r} did not write {phase.done}; its log is {log}")
        self.seconds[phase.name] = round(elapsed, 1)
        atomic_write(self._state, json.dumps(self.seconds, indent=1) + "\n")
        _say(f"{head}: {elapsed:.0f} s", final=True)

    def _stream(self, phase: Phase, head: str, log: Path) -> tuple[int, list[str]]:
        """Run the command, copy its output to `log`, show progress; returns (exit status, last lines)."""
        tail: deque[str] = deque(maxlen=15)
        process = subprocess.Popen(
            list(phase.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **phase.env},
        )
        assert process.stdout is not None
        started = shown = time.monotonic()
        _say(f"{head} ...")
        with process, log.open("w", encoding="utf-8") as handle:
            handle.write("$ " + " ".join(phase.command) + "\n")
            for raw in process.stdout:
                handle.write(raw)
                handle.flush()
                line = _ANSI.sub("", raw).split("\r")[-1].strip()
                if not line:
                    continue
                tail.append(line)
                match = _STEP.search(line)
                if match is not None and time.monotonic() - shown > 1:
                    shown = time.monotonic()
                    of = f"/{phase.total_steps}" if phase.total_steps else ""
                    _say(f"{head}: step {match[1]}{of}, {shown - started:.0f} s")
        return process.returncode, list(tail)


_last_plain = 0.0


def _say(text: str, *, final: bool = False) -> None:
    """A progress line: rewritten in place on a terminal; elsewhere at most one line in ten seconds."""
    global _last_plain
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}" + ("\n" if final or text.endswith(")") else ""))
        sys.stderr.flush()
        return
    now = time.monotonic()
    if final or not re.search(r"step \d+", text) or now - _last_plain > 10:
        _last_plain = now
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
