# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m agent_system.environments.env_package.alfworld.list_games`: what a data folder holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="list_games",
        description="Count the playable ALFWorld games of a data folder by split and task type, with the hash that "
        "results report, and the reasons for what is left out.",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="folder that contains json_2.1.1 ($ALFWORLD_DATA)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, or 2 after a one-line error when there is no game at all)."""
    options = _parser().parse_args(argv)
    from collections import Counter

    from agent_system.environments.env_package.alfworld.manifest import (
        GAMES_FOLDER,
        SPLITS,
        load_manifest,
        resolve_data_dir,
    )
    from agent_system.programs import run_program

    def run() -> int:
        folder = resolve_data_dir(options.data_dir)
        present = [split for split in SPLITS if (folder / GAMES_FOLDER / split).is_dir()]
        sys.stdout.write(f"{folder}\n")
        # Without any split the first one's error says what to do.
        for split in present or SPLITS[:1]:
            manifest = load_manifest(folder, split)
            sys.stdout.write(f"{manifest.summary()}\n")
            for task_type, count in sorted(Counter(game.task_type for game in manifest.games).items()):
                sys.stdout.write(f"  {count:6,} {task_type}\n")
        return 0

    return run_program(run)


if __name__ == "__main__":
    sys.exit(main())
