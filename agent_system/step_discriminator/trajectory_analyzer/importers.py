# SPDX-License-Identifier: Apache-2.0
"""Foreign ALFWorld logs -> trajectories.jsonl.

    python -m agent_system.step_discriminator.trajectory_analyzer.importers --format sharegpt --out t.jsonl logs.json

Such logs hold texts only. The game of a log is found by its opening text among the games of a data folder, and the
log's actions are replayed in it: observations, rewards, success and state keys of the record are the game's own.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent_system.programs import check_output, run_program
from agent_system.step_discriminator.trajectory_analyzer.alfworld_adapter import ALFWORLD_ENV_NAME
from agent_system.step_discriminator.trajectory_analyzer.episodes import Choice, EpisodeIdentity, play
from agent_system.step_discriminator.trajectory_analyzer.foreign_logs import (
    FORMATS,
    ForeignEpisode,
    opening_key,
    read_foreign_log,
)
from agent_system.step_discriminator.trajectory_analyzer.progress import progress_bar
from agent_system.trajectory import Trajectory, save_trajectories
from verl.utils.errors import UserError

__all__ = ["ImportReport", "import_episodes", "index_games", "main", "modern_action"]

logger = logging.getLogger(__name__)

_OLD_PUT = re.compile(r"put (.+?) (?:in/on|in|on) (.+)", re.IGNORECASE)
_OLD_ANSWER = re.compile(r"you put the (.+?) in/on the (.+)")


@dataclass
class ImportReport:
    """What happened to the logs."""

    imported: int = 0
    old_verbs: int = 0
    """Actions `put X in/on Y` read as `move X to Y`."""
    differing_observations: int = 0
    """Steps at which the game answered other words than the log has; an old answer to `put` is not other words."""
    problems: list[str] = field(default_factory=list)
    """One sentence per episode that was left out: file, place, reason."""


def modern_action(action: str) -> tuple[str, bool]:
    """(action in today's verbs, it was an old one): `put X in/on Y` of older releases is `move X to Y`."""
    match = _OLD_PUT.fullmatch(action.strip())
    return (f"move {match[1]} to {match[2]}", True) if match else (action.strip(), False)


@dataclass(frozen=True)
class IndexedGame:
    """One game of the data folder."""

    path: Path
    gamefile: str
    sha256: str
    task_type: str


def index_games(
    data_dir: Path | None, splits: Sequence[str], *, show_progress: bool = False
) -> dict[str, list[IndexedGame]]:
    """Opening text (see `opening_key`) -> the games that start with it, in manifest order.

    Raises:
        UserError: no data folder, no games in a split.
    """
    from agent_system.environments.env_package.alfworld import AlfworldGame
    from agent_system.environments.env_package.alfworld.manifest import load_manifest

    index: dict[str, list[IndexedGame]] = {}
    for split in splits:
        manifest = load_manifest(data_dir, split)
        with progress_bar(f"reading {split}", total=len(manifest.games), show=show_progress) as advance:
            for entry in manifest.games:
                path = manifest.gamefile(entry)
                opening, _ = AlfworldGame(path).reset()
                index.setdefault(opening_key(opening) or "", []).append(
                    IndexedGame(path, entry.path, entry.sha256, entry.task_type)
                )
                advance(1)
    return index


def import_episodes(
    episodes: Iterable[ForeignEpisode], index: Mapping[str, Sequence[IndexedGame]], *, source_kind: str
) -> tuple[list[Trajectory], ImportReport]:
    """Replay foreign episodes in the games they came from.

    Where several games open with the same text, the first in which the actions win is taken, else the first.
    """
    report = ImportReport()
    trajectories: list[Trajectory] = []
    names: Counter[str] = Counter()
    for episode in episodes:
        games = index.get(episode.opening, ())
        if not games:
            report.problems.append(f"{episode.place}: no game of the data folder opens with the text of this log")
            continue
        actions = [modern_action(action) for action in episode.actions]
        uid = f"{source_kind}-{episode.name}"
        names[uid] += 1
        if names[uid] > 1:
            uid = f"{uid}-{names[uid]}"
        played = [_replay(game, episode, [action for action, _ in actions], uid, source_kind) for game in games]
        chosen = next((item for item in played if item.success), played[0])
        report.old_verbs += sum(old for _, old in actions)
        report.differing_observations += _differences(episode, chosen)
        report.imported += 1
        trajectories.append(chosen)
    return trajectories, report


def _replay(game: IndexedGame, episode: ForeignEpisode, actions: Sequence[str], uid: str, kind: str) -> Trajectory:
    from agent_system.environments.env_package.alfworld import AlfworldGame

    choices = iter([Choice(action, response) for action, response in zip(actions, episode.responses)])
    played = AlfworldGame(game.path)
    record = {"gamefile": game.gamefile, "sha256": game.sha256, "instruction": played.task, "task_type": game.task_type}
    identity = EpisodeIdentity(
        traj_uid=uid,
        uid=uid,
        env_name=ALFWORLD_ENV_NAME,
        task=record,
        policy={"kind": f"imported/{kind}", "model": None, "sampling": None, "seed": None},
    )
    return play(played, lambda observation, info: next(choices, None), identity, len(actions))


def _differences(episode: ForeignEpisode, trajectory: Trajectory) -> int:
    answers = [step.observation for step in trajectory.steps[1:]]
    logged = episode.observations[: len(answers)]
    return sum(_plain(left) != _plain(right) for left, right in zip(answers, logged))


def _plain(text: str) -> str:
    return _OLD_ANSWER.sub(r"you move the \1 to the \2", " ".join(text.lower().split()))


def build_parser() -> argparse.ArgumentParser:
    """The command line of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_system.step_discriminator.trajectory_analyzer.importers",
        description="Turn foreign ALFWorld logs into trajectories, by replaying their actions in the games they name.",
        epilog="sharegpt: a JSON list (or JSON Lines) of conversations with `Thought: ... Action: ...` turns. "
        "verl-agent: the step.jsonl files that verl-agent style runs dump, one line per turn. Exit status 1: written, "
        "but some episodes were left out (each is named); 2: nothing was written.",
    )
    parser.add_argument("logs", nargs="+", type=Path, help="log files")
    parser.add_argument("--format", required=True, choices=sorted(FORMATS), help="format of the logs")
    parser.add_argument("--out", type=Path, required=True, help="trajectory file to write (JSON Lines)")
    parser.add_argument("--data-dir", type=Path, help="data folder (default: $ALFWORLD_DATA, then ~/.cache/alfworld)")
    parser.add_argument("--splits", nargs="+", default=["train"], help="splits to look for the games in")
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_program(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_output(args.out, "--out")
    trajectories, report = _import_logs(args)
    if not trajectories:
        raise UserError(f"no episode could be imported. The first problem: {report.problems[0]}")
    save_trajectories(args.out, trajectories)
    for problem in report.problems:
        sys.stderr.write(f"left out: {problem}\n")
    won = sum(trajectory.success for trajectory in trajectories)
    sys.stdout.write(
        f"{report.imported} episodes imported ({won} won), {len(report.problems)} left out, {report.old_verbs} old "
        f"verbs read as `move`, {report.differing_observations} observations differ from the game's -> {args.out}\n"
    )
    return 1 if report.problems else 0


def _import_logs(args: argparse.Namespace) -> tuple[list[Trajectory], ImportReport]:
    episodes: list[ForeignEpisode] = []
    problems: list[str] = []
    for log in args.logs:
        found, bad = read_foreign_log(log, args.format)
        episodes += found
        problems += bad
    if not episodes:
        raise UserError(f"no episodes in {', '.join(map(str, args.logs))}. {(problems or [''])[0]}".strip())
    index = index_games(args.data_dir, args.splits, show_progress=not args.quiet)
    trajectories, report = import_episodes(episodes, index, source_kind=args.format)
    report.problems[:0] = problems
    return trajectories, report


if __name__ == "__main__":
    sys.exit(main())
