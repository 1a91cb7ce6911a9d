# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m agent_system.environments.env_package.alfworld.play [GAME]`: play a game in a terminal."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from agent_system.environments.env_package.alfworld.game import AlfworldGame, Info, Snapshot

__all__ = ["Session", "main"]

_OWN_HELP = """Type a command of the game (Tab completes it), its number in `list`, or:
  list      the commands that work now      hint      what the expert would do
  undo      take back the last command      restart   begin again
  ?         this text                       quit      leave (or end of input)"""
_OWN = ("?", "hint", "list", "quit", "restart", "undo")


class _Turn(NamedTuple):
    """A moment of the game, and the command that was played in it."""

    snapshot: Snapshot
    observation: str
    info: Info
    command: str


class Session:
    """One game, its past, and the answers to what the player types.

    Args:
        game: any game; it is reset.
        seed: of the expert that gives hints.
    """

    def __init__(self, game: AlfworldGame, seed: int = 0) -> None:
        self._game = game
        self._seed = seed
        self._past: list[_Turn] = []
        self._observation, self._info = game.reset()

    @property
    def observation(self) -> str:
        """What the game said last."""
        return self._observation

    def completions(self, text: str) -> list[str]:
        """Everything that can be typed now and begins with `text`."""
        return [word for word in (*self._info["admissible_commands"], *_OWN) if word.startswith(text.lower())]

    def answer(self, line: str) -> str | None:
        """The text that a typed line leads to; None to leave."""
        line = " ".join(line.lower().split())
        if line in ("quit", "exit"):
            return None
        own = {"": lambda: "", "?": lambda: _OWN_HELP, "list": self._list, "hint": self._hint, "undo": self._undo}
        if line == "restart":
            self._past.clear()
            self._observation, self._info = self._game.reset()
            return self._observation
        if line in own:
            return own[line]()
        return self._play(self._by_number(line))

    def _by_number(self, line: str) -> str:
        numbered = {str(number): command for number, command in enumerate(self._info["admissible_commands"], 1)}
        return numbered.get(line, line)

    def _play(self, command: str) -> str:
        if command not in self._info["admissible_commands"]:
            near = self.completions(command)
            return "Nothing happens. " + (f"Perhaps: {', '.join(near[:5])}." if near else "Type list for what works.")
        was_won = self._info["won"]
        self._past.append(_Turn(self._game.snapshot(), self._observation, self._info, command))
        self._observation, _, _, self._info = self._game.step(command)
        if self._info["won"] and not was_won:
            return f"{self._observation}\n*** Won in {len(self._past)} steps. ***"
        return self._observation

    def _list(self) -> str:
        return "\n".join(f"{number:4} {name}" for number, name in enumerate(self._info["admissible_commands"], 1))

    def _undo(self) -> str:
        if not self._past:
            return "There is nothing to take back."
        turn = self._past.pop()
        self._game.restore(turn.snapshot)
        self._observation, self._info = turn.observation, turn.info
        return f"Taken back: {turn.command}.\n{self._observation}"

    def _hint(self) -> str:
        """What the expert would do now, had it played what was played so far."""
        import numpy as np

        from agent_system.environments.env_package.alfworld.experts import Explorer
        from verl.utils.errors import UserError

        if self._info["won"]:
            return "Hint: the game is won."
        expert = Explorer(self._game, np.random.default_rng(self._seed))
        try:
            for turn in self._past:
                expert.act(turn.observation, turn.info)
                expert.took(turn.command)
            choice = expert.act(self._observation, self._info)
        except UserError as error:
            return f"No hint: {error}"
        return f"Hint: {choice.action} ({choice.thought})"


def _choose_game(options: argparse.Namespace) -> Path:
    """The game named; else one drawn by seed from the data folder; else from a few generated ones."""
    import numpy as np

    from agent_system.environments.env_package.alfworld.generate import ensure_generated
    from agent_system.environments.env_package.alfworld.manifest import GAMES_FOLDER, load_manifest, resolve_data_dir
    from verl.utils.errors import UserError

    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: must be 0 or more.")
    if options.game is not None:
        path = Path(options.game).expanduser()
        if path.is_dir():
            found = sorted(path.rglob("game.tw-pddl"))
            if not found:
                raise UserError(f"{path}: no game.tw-pddl in this folder; name a game file, or leave GAME out.")
            return found[np.random.default_rng(options.seed).integers(len(found))]
        return path
    folder = resolve_data_dir(options.data_dir)
    if options.data_dir is None and not (folder / GAMES_FOLDER / options.split).is_dir():
        folder = ensure_generated(train=12, valid_seen=6, valid_unseen=6)
    manifest = load_manifest(folder, options.split)
    return manifest.gamefile(manifest.games[np.random.default_rng(options.seed).integers(len(manifest.games))])


def _use_completion(session: Session) -> None:
    """Tab completes whole lines to commands that work now; a terminal without readline does without."""
    try:
        import readline
    except ImportError:
        return

    def complete(text: str, state: int) -> str | None:
        found = session.completions(text)
        return found[state] if state < len(found) else None

    readline.set_completer_delims("")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


def _read(stdin: TextIO, interactive: bool) -> str | None:
    """The next line; None at the end of input. Only input() gives a terminal its line editing."""
    if not interactive:
        return stdin.readline() or None
    try:
        return input("\n> ")
    except (EOFError, KeyboardInterrupt):
        return None


def _take_any_text(*streams: TextIO) -> None:
    """Bytes that are no text in the terminal's encoding, and characters that it lacks, end no game."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _play(session: Session, stdin: TextIO, stdout: TextIO) -> None:
    interactive = stdin.isatty()
    if interactive:
        _use_completion(session)
    stdout.write(f"{session.observation}\n\n{_OWN_HELP}\n")
    while (line := _read(stdin, interactive)) is not None:
        if not interactive:
            stdout.write(f"\n> {line.strip()}\n")
        answer = session.answer(line)
        if answer is None:
            return
        stdout.write(f"{answer}\n" if answer else "")
        stdout.flush()
    stdout.write("\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="play",
        description="Play an ALFWorld text game in the terminal, with completion (Tab), undo and hints.",
        epilog="Commands can be piped in, one a line: printf 'look\\nhint\\n' | python -m "
        "agent_system.environments.env_package.alfworld.play",
    )
    parser.add_argument("game", nargs="?", metavar="GAME", help="game.tw-pddl, or a folder with games (a drawn game)")
    parser.add_argument(
        "--data-dir", metavar="DIR", help="draw from this folder ($ALFWORLD_DATA; else generated games)"
    )
    parser.add_argument("--split", default="train", choices=("train", "valid_seen", "valid_unseen"), help="(train)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which game is drawn, and the expert's (0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, or 2 after a one-line error)."""
    options = _parser().parse_args(argv)
    from agent_system.programs import run_program

    def run() -> int:
        from agent_system.environments.env_package.alfworld.game import AlfworldGame

        path = _choose_game(options)
        _take_any_text(sys.stdin, sys.stdout)
        sys.stdout.write(f"{path}\n\n")
        _play(Session(AlfworldGame(path), options.seed), sys.stdin, sys.stdout)
        return 0

    return run_program(run)


if __name__ == "__main__":
    sys.exit(main())
