# SPDX-License-Identifier: Apache-2.0
"""Which files a WebShop data folder holds, and where the folder is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from agent_system.environments.generated_folder import GENERATION_FILE
from verl.utils.errors import UserError

__all__ = ["HUMAN_FILE", "NOUNS_FILE", "DataFiles", "locate", "resolve_data_dir"]

NOUNS_FILE = "title_nouns.json"
HUMAN_FILE = "items_human_ins.json"

_HELP = (
    "Set WEBSHOP_DATA (or env.webshop.data_dir) to the folder with WebShop's files, which "
    "`python -m agent_system.environments.env_package.webshop.setup_data` names and checks; or use a generated shop: "
    "env.webshop.source=generated, or python -m agent_system.environments.env_package.webshop.generate_catalogue "
    "--out DIR."
)


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Paths of one shop's files; `human` and `nouns` need not exist."""

    folder: Path
    products: Path
    attributes: Path
    human: Path
    nouns: Path
    generated: bool


def resolve_data_dir(data_dir: str | Path | None) -> Path:
    """`data_dir`, else $WEBSHOP_DATA.

    Raises:
        UserError: neither is given, or the folder does not exist.
    """
    given = data_dir if data_dir is not None else os.environ.get("WEBSHOP_DATA")
    if not given:
        raise UserError(f"No WebShop data folder is given. {_HELP}")
    folder = Path(os.path.expandvars(given)).expanduser()
    if not folder.is_dir():
        raise UserError(f"The WebShop data folder {folder} does not exist. {_HELP}")
    return folder


def locate(data_dir: str | Path | None, small: bool) -> DataFiles:
    """The files of a shop.

    Args:
        data_dir: see `resolve_data_dir`.
        small: the 1,000-product files instead of the full ones; a generated shop has only one size.

    Raises:
        UserError: the folder or one of the two product files is missing; says which.
    """
    folder = resolve_data_dir(data_dir)
    generated = (folder / GENERATION_FILE).is_file()
    suffix = "_1000" if small and not generated else ""
    files = DataFiles(
        folder=folder,
        products=folder / f"items_shuffle{suffix}.json",
        attributes=folder / f"items_ins_v2{suffix}.json",
        human=folder / HUMAN_FILE,
        nouns=folder / NOUNS_FILE,
        generated=generated,
    )
    missing = [path.name for path in (files.products, files.attributes) if not path.is_file()]
    if missing:
        raise UserError(f"The WebShop data folder {folder} has no {' and no '.join(missing)}. {_HELP}")
    return files
