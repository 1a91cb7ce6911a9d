# SPDX-License-Identifier: Apache-2.0
"""Command line: which files WebShop's shop needs, where they come from, and whether those in a folder are whole."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_system.environments.env_package.webshop.catalogue import Catalogue
    from agent_system.environments.env_package.webshop.data_files import DataFiles

__all__ = ["main"]

_HELP = """\
WebShop's authors publish the files; https://github.com/princeton-nlp/WebShop (setup.sh) has the links:

  items_shuffle_1000.json, items_ins_v2_1000.json   the first 1,000 products and their attributes (the default)
  items_shuffle.json, items_ins_v2.json             all 1,181,436 products (--full; several gigabytes)
  items_human_ins.json                              12,087 requests that people wrote (only for human_goals=True)

Put them into one folder and name it by --data-dir or WEBSHOP_DATA. This program downloads nothing: it reads the files
whole, names the first thing wrong in them, and builds the search index that runs then share.
"""

_PRODUCTS = {"items_shuffle_1000.json": 1_000, "items_shuffle.json": 1_181_436}
# Goals of the published files, where known, by the file of products.
_SYNTHETIC_GOALS = {"items_shuffle_1000.json": 6_910}
_HUMAN_GOALS = {"items_shuffle_1000.json": 13, "items_shuffle.json": 12_087}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="setup_data",
        description="Check a folder of WebShop data, and prepare it.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-dir", metavar="DIR", help="folder of the files (default: $WEBSHOP_DATA)")
    parser.add_argument("--full", action="store_true", help="the files of all products, not the small ones")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, or 2 after a one-line error)."""
    options = _parser().parse_args(argv)
    # Imported after --help is served: these pull in numpy.
    from agent_system.programs import run_program

    return run_program(lambda: _check(options.data_dir, not options.full))


def _check(data_dir: str | None, small: bool) -> int:
    from agent_system.environments.env_package.webshop.catalogue import Catalogue
    from agent_system.environments.env_package.webshop.data_files import locate
    from agent_system.environments.env_package.webshop.goals import GoalSet
    from verl.utils.errors import UserError

    try:
        files = locate(data_dir, small)
    except UserError:
        # Its message sends readers here: they need the list.
        sys.stderr.write(f"{_HELP}\n")
        raise
    catalogue = Catalogue.load(files.folder, small=small)
    _compare(files, files.products, len(catalogue), "usable products", _PRODUCTS)
    _check_attributes(files, catalogue)
    _report(files, f"{len(catalogue)} products, hash {catalogue.hash[:16]}, nouns from {catalogue.nouns.name}")
    if not files.generated:
        synthetic = GoalSet.load(catalogue, human_goals=False)
        _compare(files, files.attributes, len(synthetic), "synthetic goals", _SYNTHETIC_GOALS)
        sys.stdout.write(f"synthetic goals: {len(synthetic)}\n")
    if files.human.is_file():
        human = GoalSet.load(catalogue, human_goals=True)
        _compare(files, files.human, len(human), "goals for these products", _HUMAN_GOALS)
        sys.stdout.write(f"human goals for these products: {len(human)}\n")
    else:
        sys.stdout.write(f"human goals: {files.human.name} is not there; human_goals=True will not work\n")
    return 0


def _compare(files: DataFiles, path: Path, found: int, things: str, published: Mapping[str, int]) -> None:
    """UserError when a file of WebShop's own has another number of things than the published one."""
    from verl.utils.errors import UserError

    expected = None if files.generated else published.get(files.products.name)
    if expected is not None and found != expected:
        raise UserError(
            f"{path} holds {found} {things} where the published file has {expected}: it was cut short or made "
            "otherwise; get it again."
        )


def _check_attributes(files: DataFiles, catalogue: Catalogue) -> None:
    """Every product of the small set and of a generated shop has an entry of attributes; those of the full set need
    none, the shop then gives them a placeholder."""
    from agent_system.environments.env_package.webshop.products import DUMMY_ATTRIBUTE
    from verl.utils.errors import UserError

    products = map(catalogue.product, range(len(catalogue)))
    missing = [product.asin for product in products if product.attributes == (DUMMY_ATTRIBUTE,)]
    if not missing:
        return
    text = f"{files.attributes} has no entry for {len(missing)} of {len(catalogue)} products (the first: {missing[0]})"
    if files.generated or files.products.name in _SYNTHETIC_GOALS:
        raise UserError(f"{text}: it was cut short or belongs to other products; get it again.")
    sys.stdout.write(f"{text}\n")


def _report(files: DataFiles, summary: str) -> None:
    for path in (files.products, files.attributes, files.human, files.nouns):
        size = f"{path.stat().st_size} bytes" if path.is_file() else "not there"
        sys.stdout.write(f"{path.name}: {size}\n")
    sys.stdout.write(f"{summary}\n")


if __name__ == "__main__":
    sys.exit(main())
