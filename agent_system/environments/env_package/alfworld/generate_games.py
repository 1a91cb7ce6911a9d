# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m agent_system.environments.env_package.alfworld.generate_games --out DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate_games",
        description="Write a folder of generated ALFWorld games, each proven winnable, in the layout of the real "
        "data: use it as ALFWORLD_DATA. Rooms and rules come from the installed alfworld package.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make (new, empty, or the same games)")
    parser.add_argument("--train", type=int, default=200, metavar="N", help="training games (200)")
    parser.add_argument("--valid-seen", type=int, default=24, metavar="N", help="held-out games, known scenes (24)")
    parser.add_argument("--valid-unseen", type=int, default=24, metavar="N", help="held-out games, new scenes (24)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="equal seeds give equal files (0)")
    parser.add_argument("--max-receptacles", type=int, metavar="N", help="trim rooms to N receptacles (all)")
    parser.add_argument("--max-objects", type=int, metavar="N", help="at most N objects besides the task's (no limit)")
    parser.add_argument("--max-object-classes", type=int, metavar="N", help="use only N object classes (all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, or 2 after a one-line error)."""
    options = vars(_parser().parse_args(argv))
    # Imported after --help is served: these pull in numpy and the package's tables.
    from agent_system.environments.env_package.alfworld.generate import generate_games
    from agent_system.environments.env_package.alfworld.manifest import SPLITS, load_manifest
    from agent_system.programs import check_output, run_program

    def run() -> int:
        folder = generate_games(**options | {"out": check_output(options["out"], "--out", folder=True)})
        for split in SPLITS:
            if options[split]:
                manifest = load_manifest(folder, split)
                sys.stdout.write(f"{split}: {len(manifest.games)} games, {manifest.hash[:16]}\n")
        sys.stdout.write(f"ALFWORLD_DATA={folder}\n")
        return 0

    return run_program(run)


if __name__ == "__main__":
    sys.exit(main())
