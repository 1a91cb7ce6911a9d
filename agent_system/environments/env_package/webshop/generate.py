# SPDX-License-Identifier: Apache-2.0
"""A folder with a generated shop in the schema of WebShop's files, written whole or not at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.webshop.data_files import HUMAN_FILE, NOUNS_FILE
from agent_system.environments.env_package.webshop.generated_goals import make_goal
from agent_system.environments.env_package.webshop.generated_products import MadeProduct, make_products
from agent_system.environments.env_package.webshop.random_source import Draws
from agent_system.environments.generated_folder import identity_hash, write_generated
from verl.utils.errors import UserError
from verl.utils.fs import file_hash, user_cache_dir

__all__ = ["CatalogueOptions", "ensure_generated", "generate_catalogue"]

# Raised whenever equal options give another shop than before.
_GENERATOR_VERSION = 1
_TRIES = 8  # to find a request that was not made before


@dataclass(frozen=True, slots=True)
class CatalogueOptions:
    """What determines a generated shop: equal options give equal files."""

    products: int = 1000
    goals: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.products < 1 or self.goals < 1:
            raise UserError(f"products={self.products} and goals={self.goals} must be 1 or more.")
        if self.seed < 0:
            raise UserError(f"seed={self.seed} is negative; set it to 0 or more.")


def generate_catalogue(out: str | Path, products: int = 1000, goals: int = 2000, seed: int = 0) -> Path:
    """Write a shop; nothing is done when `out` holds the same one already.

    The folder holds the product file, the attribute file, the goals (in the form of the human instructions), the nouns
    of the titles and a record of the options; it appears under its name only when complete.

    Args:
        out: folder to make; it must not exist, be empty, or hold the same shop.
        products, goals: how many; each product has goals before one has two.
        seed: 0 or more; equal arguments give equal bytes on every machine.

    Returns:
        `out` as a path, usable as WEBSHOP_DATA.

    Raises:
        UserError: an argument is out of range, or `out` holds something else.
    """
    options = CatalogueOptions(products, goals, seed)
    return write_generated(
        out, _identity(options), "products", lambda folder: _write_all(folder, options), _first_changed
    )


def ensure_generated(out: str | Path | None = None, **options: Any) -> Path:
    """`generate_catalogue` with a default place: ~/.cache/trajevolve/webshop-data-<hash of the options>."""
    if out is None:
        out = user_cache_dir() / f"webshop-data-{identity_hash(_identity(CatalogueOptions(**options)))}"
    return generate_catalogue(out, **options)


def _identity(options: CatalogueOptions) -> dict[str, Any]:
    return {"generator_version": _GENERATOR_VERSION, "options": asdict(options)}


def _first_changed(folder: Path, hashes: Mapping[str, str]) -> Path | None:
    paths = {folder / name: digest for name, digest in hashes.items()}
    return next((path for path, digest in paths.items() if not path.is_file() or file_hash(path) != digest), None)


def _write_all(folder: Path, options: CatalogueOptions) -> dict[str, Any]:
    families = list(make_products(options.products, options.seed))
    products = Draws(options.seed, "order").shuffled([product for family in families for product in family])
    goals = _make_goals(products, options)
    _write_list(folder / "items_shuffle.json", (product.record(i // 50 + 1) for i, product in enumerate(products)))
    attributes = {product.asin: {"attributes": list(product.attributes)} for product in products}
    files = {"items_ins_v2.json": attributes, HUMAN_FILE: goals, NOUNS_FILE: {p.asin: list(p.nouns) for p in products}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8", newline="\n")
    names = ["items_shuffle.json", *files]
    return {
        "families": dict(sorted(Counter(family[0].family for family in families).items())),
        "hashes": {name: file_hash(folder / name) for name in sorted(names)},
    }


def _write_list(path: Path, records: Iterable[dict[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("[\n")
        for place, record in enumerate(records):
            file.write(("" if place == 0 else ",\n") + json.dumps(record))
        file.write("\n]\n")


def _make_goals(products: list[MadeProduct], options: CatalogueOptions) -> dict[str, list[dict[str, object]]]:
    """Goals by asin; products take turns, and no request is made twice for a product if it can be helped."""
    goals: dict[str, list[dict[str, object]]] = {}
    for number in range(options.goals):
        product = products[number % len(products)]
        made = goals.setdefault(product.asin, [])
        before = {goal["instruction"] for goal in made}
        draws = Draws(options.seed, "goal", number)
        for _ in range(_TRIES):
            goal = make_goal(product, draws)
            if goal["instruction"] not in before:
                break
        made.append(goal)
    return goals
