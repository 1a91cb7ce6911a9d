# SPDX-License-Identifier: Apache-2.0
"""Turns the files of a shop into the form that catalogues map: checked records, prices, and the search index."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_system.environments.env_package.webshop.data_files import DataFiles
from agent_system.environments.env_package.webshop.json_stream import iter_list, iter_object
from agent_system.environments.env_package.webshop.nouns import NounTable
from agent_system.environments.env_package.webshop.products import (
    AttributeEntry,
    Product,
    parse_attribute_entry,
    parse_product,
)
from agent_system.environments.env_package.webshop.search import IndexBuilder
from agent_system.environments.env_package.webshop.store import RecordWriter, open_or_build, read_meta, write_meta
from verl.utils.errors import UserError
from verl.utils.fs import file_hash

__all__ = ["compiled_form", "compiled_form_at", "read_products"]

logger = logging.getLogger(__name__)

# Raised whenever the compiled form changes, so that an old one is not taken for a new one.
_FORMAT = 3
_REPORT_EVERY = 100_000


def compiled_form(files: DataFiles, num_products: int | None, root: Path) -> tuple[Path, dict[str, Any]]:
    """Folder and description of a shop's compiled form below `root`, made where it is absent.

    Raises:
        UserError: a file is truncated or of another form.
    """
    digest = content_hash(files, num_products)
    folder = root / f"webshop-{digest[:16]}-v{_FORMAT}"
    return folder, open_or_build(folder, lambda place: _compile(place, files, num_products, digest))


def compiled_form_at(folder: Path, files: DataFiles, num_products: int | None, digest: str) -> dict[str, Any]:
    """Description of the compiled form in `folder`; where it is absent (another machine), it is made from the files.

    Raises:
        UserError: it is absent and the files are not those with the content `digest`.
    """
    meta = read_meta(folder)
    if meta is not None:
        return meta
    if content_hash(files, num_products) != digest:
        raise UserError(f"The WebShop files in {files.folder} are not those that this run started with.")
    return open_or_build(folder, lambda place: _compile(place, files, num_products, digest))


def content_hash(files: DataFiles, num_products: int | None) -> str:
    """Hex SHA-256 of what determines a catalogue."""
    digest = hashlib.sha256(f"{num_products}\n".encode())
    for path in (files.products, files.attributes, files.nouns):
        if not path.is_file():
            continue  # only the table of nouns is optional
        status = path.stat()
        digest.update(_hash_of(path, status.st_size, status.st_mtime_ns).encode())
    return digest.hexdigest()


@lru_cache(maxsize=16)
def _hash_of(path: Path, size: int, modified: int) -> str:
    """`file_hash`, once per process for a file that keeps its size and time: full files take seconds."""
    return file_hash(path)


def read_products(files: DataFiles, num_products: int | None = None) -> Iterator[tuple[Product, AttributeEntry | None]]:
    """The products of the product file that the shop shows, in order, each with its entry of the attribute file.

    Left out, as the original does: asins "nan", of more than ten characters, or seen before.

    Raises:
        UserError: a file is truncated or of another form; names file, product and field.
    """
    attributes = {
        asin: parse_attribute_entry(entry, f"{files.attributes.name}: {asin}")
        for asin, entry in iter_object(files.attributes)
    }
    seen: set[str] = set()
    for position, record in enumerate(iter_list(files.products)):
        if num_products is not None and position >= num_products:
            return
        product = parse_product(record, attributes, f"{files.products.name}: product {position}")
        if product is not None and product.asin not in seen:
            seen.add(product.asin)
            yield product, attributes.get(product.asin)


def _compile(folder: Path, files: DataFiles, num_products: int | None, digest: str) -> None:
    logger.info("compiling the catalogue in %s", files.folder)
    index = IndexBuilder()
    asins: list[bytes] = []
    prices: list[tuple[float, float]] = []
    instructed: list[int] = []
    combinations: list[int] = []
    table = NounTable.from_file(files.nouns) if files.nouns.is_file() else None
    with ExitStack() as stack:
        products, listings, instructions, nouns = (
            stack.enter_context(RecordWriter(folder, name)) for name in ("product", "listing", "instruction", "nouns")
        )
        for product, entry in read_products(files, num_products):
            products.add(astuple(product))
            listings.add((product.asin, product.title, product.price_tag))
            if table is not None:
                nouns.add(table.nouns(product.asin, product.title))
            if entry is not None and entry.instruction:
                instructions.add((entry.instruction, entry.instruction_attributes))
                instructed.append(len(asins))
                combinations.append(math.prod(len(values) for _, values in product.options))
            asins.append(product.asin.encode("ascii"))
            prices.append((product.prices[0], product.prices[1] if len(product.prices) > 1 else math.nan))
            index.add(product.search_text())
            if len(asins) % _REPORT_EVERY == 0:
                logger.info("%d products read", len(asins))
    if not asins:
        raise UserError(f"{files.products} holds no usable product.")
    names = np.array(asins)
    order = np.argsort(names, kind="stable").astype(np.int32)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    arrays: dict[str, NDArray[Any]] = {
        "prices": np.array(prices, np.float64),
        "instructed": np.array(instructed, np.int32),
        "combinations": np.array(combinations, np.int64),
        "sorted_asins": names[order],
        "asin_order": order,
        **index.build(rank),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    write_meta(
        folder, {"hash": digest, "products": len(asins), "num_products": num_products, "has_nouns": table is not None}
    )
