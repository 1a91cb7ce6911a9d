# SPDX-License-Identifier: Apache-2.0
"""WebShop: `python -m tests.bench.bench_webshop [--quick] [--sizes N ...] [--data-dir DIR]`.

Three tables: speed of sessions, memory of sessions that share a catalogue (in one process, and one per process), and
search at several sizes with the estimate for the full catalogue. Every size runs in a process of its own, so that one
measurement leaves nothing behind for the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.table import environment_line, format_seconds, print_table, time_best

FULL = 1_181_436
_SESSIONS = (1, 8, 64)
_SIZES = (1_000, 50_000, 200_000)
_QUICK_SIZES = (1_000, 4_000)
_EPISODES = 40
_ALL_EPISODES = 512
_QUERIES = 200


def _memory() -> tuple[float, float]:
    """Resident memory of this process, and the part that is not mapped from files (and so never shared), MiB."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0])
    return fields["Rss"] / 1024, fields["Anonymous"] / 1024


def _load(folder: str, cache: str) -> tuple[Any, Any]:
    from agent_system.environments.env_package.webshop.catalogue import Catalogue
    from agent_system.environments.env_package.webshop.goals import GoalSet

    catalogue = Catalogue.load(folder, cache_dir=cache)
    return catalogue, GoalSet.load(catalogue)


def _play(session: Any, goal: int, detours: bool = True) -> int:
    """One episode of the scripted expert; returns its number of steps."""
    import numpy as np

    from agent_system.environments.env_package.webshop.experts import WebShopExplorer

    expert = WebShopExplorer(session, np.random.default_rng(goal), 0.3 if detours else 0.0)
    observation, info = session.reset(goal)
    for step in range(15):
        observation, _, done, info = session.step(expert.act(observation, info).action)
        if done:
            return step + 1
    return 15


# -- measurements, each in a process of its own ---------------------------------------------------------------------


def measure_speed(folder: str, cache: str) -> dict[str, float]:
    """Seconds of a start without and with a compiled catalogue, of a reset and of a step."""
    start = time.perf_counter()
    _load(folder, cache)
    first = time.perf_counter() - start
    again = time_best(lambda: _load(folder, cache), 3)
    catalogue, goals = _load(folder, cache)
    from agent_system.environments.env_package.webshop.session import WebShopSession

    session = WebShopSession(catalogue, goals)
    count = len(goals)
    cursor = iter(range(10**9))
    reset = time_best(lambda: session.reset(next(cursor) % count), 200)
    actions = _recorded_actions(catalogue, goals)
    steps = sum(len(episode) for _, episode in actions)

    def replay() -> None:
        for goal, episode in actions:
            session.reset(goal)
            for action in episode:
                session.step(action)

    cold = _timed(replay)
    return {"first": first, "again": again, "reset": reset, "step": time_best(replay, 5) / steps, "cold": cold / steps}


def _timed(body: Any) -> float:
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def _recorded_actions(catalogue: Any, goals: Any) -> list[tuple[int, list[str]]]:
    """What the expert does, taken from other sessions so that the measured ones start with empty memories."""
    import numpy as np

    from agent_system.environments.env_package.webshop.experts import WebShopExplorer
    from agent_system.environments.env_package.webshop.session import WebShopSession

    episodes = []
    for goal in range(min(_EPISODES, len(goals))):
        session = WebShopSession(catalogue, goals)
        expert = WebShopExplorer(session, np.random.default_rng(goal), 0.3)
        observation, info = session.reset(goal)
        actions: list[str] = []
        done = False
        while not done and len(actions) < 15:
            actions.append(expert.act(observation, info).action)
            observation, _, done, info = session.step(actions[-1])
        episodes.append((goal, actions))
    return episodes


def measure_sessions(folder: str, cache: str, sessions: int) -> dict[str, float]:
    """MiB that `sessions` sessions need beyond an interpreter with the code.

    They play at once, and the same number of episodes in all whatever their number, so that the same part of the
    catalogue is looked at.
    """
    from agent_system.environments.env_package.webshop.experts import WebShopExplorer
    from agent_system.environments.env_package.webshop.session import WebShopSession

    assert WebShopExplorer
    before, _ = _memory()
    catalogue, goals = _load(folder, cache)
    players = [WebShopSession(catalogue, goals) for _ in range(sessions)]
    for episode in range(_ALL_EPISODES):
        _play(players[episode % sessions], episode % len(goals))
    resident, _ = _memory()
    return {"resident": resident - before}


def measure_search(folder: str, cache: str) -> dict[str, float]:
    """Seconds to compile and to open, MiB of the index on disk and of peak memory, seconds per query."""
    from agent_system.environments.env_package.webshop.request import parse_request

    start = time.perf_counter()
    catalogue, goals = _load(folder, cache)
    build = time.perf_counter() - start
    # Not `ru_maxrss`, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    queries = [parse_request(goals[goal].instruction_text).query for goal in range(min(_QUERIES, len(goals)))]
    search = catalogue._index.search  # without the memory of past queries
    seconds = [_timed(lambda query=query: search(query)) for query in queries]  # type: ignore[misc]
    best = [min(first, _timed(lambda query=query: search(query))) for query, first in zip(queries, seconds)]  # type: ignore[misc]
    size = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file()) / 2**20
    return {
        "build": build,
        "peak": peak,
        "size": size,
        "query": sum(best) / len(best),
        "slowest": max(best),
        "products": len(catalogue),
    }


def measure_worker(folder: str, cache: str) -> dict[str, float]:
    """MiB of a process that opens a compiled catalogue and searches: all of it, and what it does not share."""
    from agent_system.environments.env_package.webshop.request import parse_request

    before, own_before = _memory()
    catalogue, goals = _load(folder, cache)
    for goal in range(min(_QUERIES, len(goals))):
        catalogue.search(parse_request(goals[goal].instruction_text).query)
    resident, own = _memory()
    return {"mapped": resident - before, "own": own - own_before}


_MEASURES = {"speed": measure_speed, "sessions": measure_sessions, "search": measure_search, "worker": measure_worker}


def _apart(name: str, *arguments: object) -> dict[str, float]:
    """Run a measurement in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.bench_webshop", "--measure", name, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- tables ---------------------------------------------------------------------------------------------------------


def _print_speed(folder: str, root: Path) -> None:
    found = _apart("speed", folder, root / "speed")
    print("Sessions (text mode, the scripted expert's actions)\n")
    rows = [
        ["first start (compiles the catalogue)", format_seconds(found["first"]), ""],
        ["later starts", format_seconds(found["again"]), ""],
        ["reset", format_seconds(found["reset"]), f"{1 / found['reset']:,.0f}"],
        ["step, pages seen before", format_seconds(found["step"]), f"{1 / found['step']:,.0f}"],
        ["step, new pages", format_seconds(found["cold"]), f"{1 / found['cold']:,.0f}"],
    ]
    print_table(["what", "time", "per second"], rows)


def _print_memory(folder: str, root: Path) -> float:
    cache = root / "speed"  # compiled already
    found = {sessions: _apart("sessions", folder, cache, sessions) for sessions in _SESSIONS}
    first = found[1]["resident"]
    growth = {sessions: (record["resident"] - first) / first for sessions, record in found.items()}
    print("\nMemory of sessions in one process (beyond the interpreter and the code; 512 episodes in all)\n")
    print_table(
        ["sessions", "MiB", "growth after the first"],
        [[sessions, f"{found[sessions]['resident']:.1f}", f"{growth[sessions]:.1%}"] for sessions in _SESSIONS],
    )
    return growth[_SESSIONS[-1]]


def _search_record(folder: str, cache: Path) -> dict[str, float]:
    return {**_apart("search", folder, cache), **_apart("worker", folder, cache)}


def _search_row(name: str, record: dict[str, float]) -> list[str]:
    return [
        name,
        format_seconds(record["build"]),
        f"{record['size']:.1f}",
        f"{record['peak']:.0f}",
        f"{record['own']:.1f}",
        format_seconds(record["query"]),
        format_seconds(record["slowest"]),
    ]


def _print_search(sizes: Sequence[int], data_dir: str | None, root: Path) -> None:
    from agent_system.environments.env_package.webshop.generate import generate_catalogue

    records = {}
    for size in sizes:
        folder = generate_catalogue(root / f"shop-{size}", products=size, goals=_QUERIES)
        records[size] = _search_record(str(folder), root / f"cache-{size}")
    rows = [_search_row(f"{size:,}", record) for size, record in records.items()]
    # Everything grows in proportion to the products; what does not is the interpreter, which both ends contain.
    low, high = records[min(sizes)], records[max(sizes)]
    share = (FULL - min(sizes)) / (max(sizes) - min(sizes))
    estimate = {name: low[name] + (high[name] - low[name]) * share for name in low}
    rows.append(_search_row(f"{FULL:,} (estimate)", estimate))
    if data_dir is not None:
        original = _search_record(data_dir, root / "cache-original")
        rows.append(_search_row(f"{original['products']:,.0f} (--data-dir)", original))
        # Real pages are longer than generated ones: by the size of the compiled form.
        longer = original["size"] / original["products"] * min(sizes) / low["size"]
        scaled = {name: low[name] + (estimate[name] - low[name]) * longer for name in low}
        rows.append(_search_row(f"{FULL:,} (estimate, pages {longer:.1f} times as long)", scaled))
    print("\nSearch on generated shops (compiling includes reading and checking the files; queries of 200 requests)\n")
    head = ["products", "compile", "MiB on disk (mapped)", "peak MiB of compiling", "own MiB of a worker"]
    print_table([*head, "query, mean", "query, slowest"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 1 when 64 sessions need 25 % more memory than one."""
    parser = argparse.ArgumentParser(prog="bench_webshop", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, under 20 seconds")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="numbers of products for the search table")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="shop for the first two tables (default: a generated one), and one more row of the third",
    )
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        name, *arguments = options.measure
        values = [int(value) if value.isdigit() else value for value in arguments]
        print(json.dumps(_MEASURES[name](*values)))
        return 0
    sizes = options.sizes or (_QUICK_SIZES if options.quick else _SIZES)
    with tempfile.TemporaryDirectory(prefix="bench_webshop_") as place:
        root = Path(place)
        from agent_system.environments.env_package.webshop.generate import generate_catalogue

        if len(set(sizes)) < 2:
            parser.error("--sizes needs two different sizes at least")
        folder = options.data_dir or str(generate_catalogue(root / "shop"))
        _print_speed(folder, root)
        growth = _print_memory(folder, root)
        _print_search(sorted(sizes), options.data_dir, root)
    print(f"\n{environment_line(('numpy',))}")
    return 0 if growth < 0.25 else 1


if __name__ == "__main__":
    sys.exit(main())
