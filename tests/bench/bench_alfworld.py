# SPDX-License-Identifier: Apache-2.0
"""The ALFWorld engines side by side: `python -m tests.bench.bench_alfworld [--quick]`.

Everything is measured in one run, on games generated for it: the stock engine (alfworld's wrappers over textworld),
the simulator that plays the known release, and the interpreter that plays files of any other domain (the same games
with one line added to their domain). Steps are those of a random walk, so states are new when they are timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from agent_system.environments.env_package.alfworld.game import AlfworldGame
from tests.bench.table import environment_line, format_seconds, print_table

Engine = Literal["auto", "stock"]


@dataclass
class Times:
    """Seconds of each call of one engine."""

    first: list[float] = field(default_factory=list)
    """Make the engine for a file it has not seen, and reset."""
    cached: list[float] = field(default_factory=list)
    """The same in a new process, with what the first one left on disk (interpreter only)."""
    reset: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


def _timed(into: list[float], call: Callable[[], object]) -> object:
    start = time.perf_counter()
    result = call()
    into.append(time.perf_counter() - start)
    return result


def _walk(game: AlfworldGame, commands: list[str], times: Times, steps: int, rng: np.random.Generator) -> None:
    """A random walk; verbs are drawn first, so that all kinds of steps are met."""
    for _ in range(steps):
        verbs = sorted({command.split(" ")[0] for command in commands})
        verb = verbs[rng.integers(len(verbs))]
        options = [command for command in commands if command.startswith(verb)]
        command = options[rng.integers(len(options))]
        start = time.perf_counter()
        _, _, _, info = game.step(command)
        times.step.append(time.perf_counter() - start)
        commands = info["admissible_commands"]


def measure(files: list[Path], engine: Engine, steps: int, resets: int) -> Times:
    """Load, reset and walk each file with one engine."""
    times = Times()
    for number, file in enumerate(files):
        gc.collect()
        game = _timed(times.first, lambda file=file: _opened(file, engine))
        assert isinstance(game, AlfworldGame)
        for _ in range(resets):
            _timed(times.reset, game.reset)
        _walk(game, game.reset()[1]["admissible_commands"], times, steps, np.random.default_rng(number))
    return times


def _opened(file: Path, engine: Engine) -> AlfworldGame:
    game = AlfworldGame(file, engine)
    game.reset()
    return game


def other_domain(files: list[Path], folder: Path) -> list[Path]:
    """Copies of game files with a line added to their domain, so that the simulator does not know it."""
    copies = []
    for file in files:
        data = json.loads(file.read_text(encoding="utf-8"))
        data["pddl_domain"] += "\n; another release\n"
        copy = folder / file.parent.parent.name / file.parent.name / file.name
        copy.parent.mkdir(parents=True)
        copy.write_text(json.dumps(data), encoding="utf-8")
        copies.append(copy)
    return copies


def _rss_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as handle:
        return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _libraries() -> int:
    """Copies of the planner's library that this process holds (34 MB of disk each, until it ends)."""
    with open("/proc/self/maps", encoding="utf-8") as handle:
        return len({line.split()[4] for line in handle if "libdownward" in line})


def memory_per_environment(files: list[Path], engine: Engine) -> tuple[float, int]:
    """(MB of each environment after the first, library copies of each), with a game of its own for every one."""
    games = [_opened(files[0], engine)]
    gc.collect()
    before, libraries = _rss_mb(), _libraries()
    games += [_opened(file, engine) for file in files[1:]]
    gc.collect()
    count = len(files) - 1
    return (_rss_mb() - before) / count, (_libraries() - libraries) // count


def _in_child(call: Callable[[], tuple[float, int]]) -> tuple[float, int]:
    """Run a measurement in a forked process, so that one does not find the memory that another has freed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, json.dumps(call()).encode("ascii"))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as handle:
        content = handle.read()
    os.waitpid(child, 0)
    size, libraries = json.loads(content)
    return size, libraries


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    saved = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if saved is not None:
            os.environ["XDG_CACHE_HOME"] = saved


def _rows(stock: Times, simulator: Times, interpreter: Times) -> list[list[object]]:
    wanted = [
        ("first load of an unseen game, with reset", "first", 50.0, 5.0),
        ("the same, translation on disk", "cached", None, 5.0),
        ("warm reset", "reset", 1000.0, None),
        ("step with text and commands, new states", "step", 1000.0, 20.0),
    ]
    rows: list[list[object]] = []
    for label, name, fast_target, slow_target in wanted:
        base = float(np.mean(getattr(stock, name) or stock.first))
        cells: list[object] = [label, format_seconds(base)]
        for times, target in ((simulator, fast_target), (interpreter, slow_target)):
            values = getattr(times, name)
            if not values:
                cells += ["-", "-", "-"]
                continue
            mean = float(np.mean(values))
            cells += [format_seconds(mean), f"{base / mean:,.0f}x", "-" if target is None else f"{target:,.0f}x"]
        rows.append(cells)
    return rows


def _interpret_again(files: list[Path]) -> list[float]:
    """First loads of a process that finds the translations on disk: this process forgets its games."""
    from agent_system.environments.env_package.alfworld import interpreted

    interpreted._cache.clear()
    times: list[float] = []
    for file in files:
        gc.collect()
        _timed(times, lambda file=file: _opened(file, "auto"))
    return times


def main() -> int:
    """Measure and print two Markdown tables."""
    parser = argparse.ArgumentParser(prog="bench_alfworld", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer games and steps (under 20 s)")
    options = parser.parse_args()
    games, steps, resets, memory_games = (2, 10, 2, 3) if options.quick else (6, 40, 4, 8)

    from agent_system.environments.env_package.alfworld.generate import generate_games

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = max(games, memory_games)
        root = generate_games(folder / "games", train=total, valid_seen=0, valid_unseen=0, seed=11)
        files = sorted(root.glob("json_2.1.1/train/*/*/game.tw-pddl"))
        others = other_domain(files, folder / "other")
        with _cache_in(folder / "cache"):
            # One load each beforehand: imports and parsers are not what is compared.
            warm = other_domain(files[:1], folder / "warm")
            for engine, file in (("stock", warm[0]), ("auto", warm[0])):
                _opened(file, engine)
            os.remove(warm[0])
            stock = measure(files[:games], "stock", steps, resets)
            simulator = measure(files[:games], "auto", 25 * steps, 50 * resets)
            interpreter = measure(others[:games], "auto", 5 * steps, 10 * resets)
            interpreter.cached = _interpret_again(others[:games])
            kinds: list[tuple[str, list[Path], Engine]] = [
                ("stock", files, "stock"), ("simulator", files, "auto"), ("interpreter", others, "auto"),
            ]  # fmt: skip
            memory = [
                (label, *_in_child(lambda paths=paths, engine=engine: memory_per_environment(paths, engine)))
                for label, paths, engine in kinds
            ]
    print(f"{games} games, {games * steps} steps of the stock engine, {len(simulator.step)} of the simulator, "
          f"{len(interpreter.step)} of the interpreter; means.\n")  # fmt: skip
    head = ["", "stock", "simulator", "faster", "target", "interpreter", "faster", "target"]
    print_table(head, _rows(stock, simulator, interpreter))
    print()
    head = ["each further environment in a process", "memory (MB)", "copies of the 34 MB library"]
    print_table(head, [[label, f"{size:.2f}", copies] for label, size, copies in memory])
    print(f"\n{environment_line(('alfworld', 'textworld', 'numpy'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
