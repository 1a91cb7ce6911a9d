# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m agent_system.environments.env_package.webshop.generate_catalogue --out DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate_catalogue",
        description="Write a folder with a generated shop (products, attributes, goals, nouns of titles) in the schema "
        "of WebShop's own files: use it as WEBSHOP_DATA. Needs no download.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make (new, empty, or the same shop)")
    parser.add_argument("--products", type=int, default=1000, metavar="N", help="number of products (1000)")
    parser.add_argument("--goals", type=int, default=2000, metavar="N", help="number of goals (2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="equal seeds give equal files (0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, or 2 after a one-line error)."""
    options = vars(_parser().parse_args(argv))
    # Imported after --help is served: these pull in numpy.
    from agent_system.environments.env_package.webshop.generate import generate_catalogue
    from agent_system.programs import check_output, run_program

    def run() -> int:
        folder = generate_catalogue(**options | {"out": check_output(options["out"], "--out", folder=True)})
        sys.stdout.write(f"{options['products']} products, {options['goals']} goals\nWEBSHOP_DATA={folder}\n")
        return 0

    return run_program(run)


if __name__ == "__main__":
    sys.exit(main())
