# SPDX-License-Identifier: Apache-2.0
"""`Catalogue`: every product of a shop and its search index, read-only and shared by all sessions of a machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_system.environments.env_package.webshop.compiled import compiled_form, compiled_form_at
from agent_system.environments.env_package.webshop.data_files import NOUNS_FILE, DataFiles, locate
from agent_system.environments.env_package.webshop.nouns import NounExtractor, default_nouns
from agent_system.environments.env_package.webshop.products import Product
from agent_system.environments.env_package.webshop.search import SearchIndex
from agent_system.environments.env_package.webshop.store import Records, map_array, read_meta
from verl.utils.errors import UserError
from verl.utils.fs import user_cache_dir

__all__ = ["Catalogue", "Listing", "noun_source"]

logger = logging.getLogger(__name__)

_SELF_TEST_WORDS = 8
_PRODUCTS_KEPT = 64  # decoded products kept per catalogue: enough for what a batch of sessions looks at
_SEARCHES_KEPT = 256
_CATALOGUES_KEPT = 8  # per process


class Listing(NamedTuple):
    """What a results page says of a product."""

    asin: str
    title: str
    price_tag: str


class _ListedNouns:
    """The table of nouns that came with a shop, in its compiled form."""

    name = f"table:{NOUNS_FILE}"

    def __init__(self, catalogue: Catalogue, records: Records) -> None:
        self._catalogue = catalogue
        self._records = records

    def nouns(self, asin: str, title: str) -> Sequence[str]:
        """The listed nouns of a product of the shop."""
        number = self._catalogue.number_of(asin)
        if number is None:
            raise ValueError(f"the shop has no product {asin}")
        found: list[str] = self._records[number]
        return found


class Catalogue:
    """The products of one shop, numbered from 0 in the order of the product file.

    The original files are compiled once (per content, under `cache_dir`); every process maps the compiled form, so
    that any number of sessions and workers of a machine share one copy. Catalogues travel to other processes as the
    path of that form.
    """

    def __init__(self, files: DataFiles, compiled: Path, meta: dict[str, Any], nouns: NounExtractor | None) -> None:
        """Use `Catalogue.load`."""
        self.data_dir = files.folder
        self.files = files
        self.hash: str = meta["hash"]
        self._compiled = compiled
        self._num_products: int = meta["products"]
        self._limit: int | None = meta["num_products"]
        self._index = SearchIndex.from_arrays({name: map_array(compiled, name) for name in SearchIndex.names()})
        self._listings = Records(compiled, "listing")
        self._products = Records(compiled, "product")
        self._instructions = Records(compiled, "instruction")
        self.prices: NDArray[np.float64] = map_array(compiled, "prices")
        """float64 (products, 2): the price, or both ends of its range; the second is NaN for a single price."""
        self.instructed: NDArray[np.int32] = map_array(compiled, "instructed")
        """int32: numbers of the products with synthetic goals, ascending."""
        self.combinations: NDArray[np.int64] = map_array(compiled, "combinations")
        """int64: ways to choose one value of every option, for each of `instructed`."""
        self._sorted_asins = map_array(compiled, "sorted_asins")
        self._asin_order = map_array(compiled, "asin_order")
        self._decode = lru_cache(maxsize=_PRODUCTS_KEPT)(self._read_product)
        self._find = lru_cache(maxsize=_SEARCHES_KEPT)(self._run_search)
        self.nouns: NounExtractor
        """Finds the nouns of titles for the reward."""
        if nouns is not None:
            self.nouns = nouns
        elif meta["has_nouns"]:
            self.nouns = _ListedNouns(self, Records(compiled, "nouns"))
        else:
            self.nouns = default_nouns()
        self._self_test()

    @classmethod
    def load(
        cls,
        data_dir: str | Path | None = None,
        *,
        small: bool = True,
        num_products: int | None = None,
        nouns: NounExtractor | None = None,
        cache_dir: str | Path | None = None,
    ) -> Catalogue:
        """Open a shop, compiling its files first where that was not done yet.

        Args:
            data_dir: folder of the files; None reads $WEBSHOP_DATA. A generated shop is recognised by its record.
            small: the 1,000-product files, not the full ones (generated shops have one size).
            num_products: only the first so many products of the file.
            nouns: of titles; None takes the table in the folder, else an installed spaCy model, else content
                words, with a warning.
            cache_dir: where compiled forms are kept; None = ~/.cache/trajevolve.

        Raises:
            UserError: a file is missing, truncated or of another form; says which file, product and field.
        """
        files = locate(data_dir, small)
        root = Path(cache_dir).expanduser() if cache_dir is not None else user_cache_dir()
        compiled, meta = compiled_form(files, num_products, root)
        if nouns is None:
            return _shared(files, compiled)
        return cls(files, compiled, meta, nouns)

    def __reduce__(self) -> tuple[Any, ...]:
        nouns = None if isinstance(self.nouns, _ListedNouns) else self.nouns
        return _reopen, (self.files, self._compiled, self._limit, self.hash, nouns)

    def __len__(self) -> int:
        return self._num_products

    @property
    def generated(self) -> bool:
        """Whether the shop was made by the generator."""
        return self.files.generated

    def metadata(self) -> dict[str, Any]:
        """For the record of a run: `products` (count), `catalogue_hash`, `catalogue` ("generated" or "data"),
        `nouns` (which extractor the reward uses)."""
        return {
            "products": len(self),
            "catalogue_hash": self.hash,
            "catalogue": "generated" if self.generated else "data",
            "nouns": self.nouns.name,
        }

    def product(self, number: int) -> Product:
        """The product with a number."""
        return self._decode(number)

    def listing(self, number: int) -> Listing:
        """Asin, title and price tag of a product, cheaper than the whole of it."""
        return Listing(*self._listings[number])

    def number_of(self, asin: str) -> int | None:
        """The number of the product with an asin, None if there is none."""
        wanted = asin.encode("ascii", "replace")
        place = int(np.searchsorted(self._sorted_asins, wanted))
        if place == len(self) or self._sorted_asins[place] != wanted:
            return None
        return int(self._asin_order[place])

    def instruction(self, place: int) -> tuple[str, tuple[str, ...]]:
        """Text and attributes of the synthetic goals of product `instructed[place]`."""
        text, attributes = self._instructions[place]
        return text, tuple(attributes)

    def search(self, query: str) -> NDArray[np.int32]:
        """Numbers of the best products for a query, best first, at most 50; not to be written to."""
        return self._find(query)

    def _run_search(self, query: str) -> NDArray[np.int32]:
        hits = self._index.search(query)
        hits.flags.writeable = False
        return hits

    def _read_product(self, number: int) -> Product:
        asin, title, description, bullets, attributes, options, prices, category, query, path = self._products[number]
        return Product(
            asin, title, description, tuple(bullets), tuple(attributes),
            tuple((name, tuple(values)) for name, values in options), tuple(prices), category, query, path,
        )  # fmt: skip

    def _self_test(self) -> None:
        """A search for the first title's words must find something: an index that finds nothing trains nothing."""
        query = " ".join(self.listing(0).title.lower().split()[:_SELF_TEST_WORDS])
        documents = int(self._index.documents_with_text)
        if documents and len(self._index.asin_rank) != len(self):
            raise UserError(f"The index {self._compiled} has another size than its catalogue; remove the folder.")
        if documents == len(self) and not len(self.search(query)):
            logger.warning("a search for %r, the first product's title, finds nothing in %s", query, self.data_dir)


def noun_source(folder: Path) -> str:
    """Name of the noun extractor that `Catalogue.load` takes for a folder by default; the shop is not opened."""
    return _ListedNouns.name if (folder / NOUNS_FILE).is_file() else default_nouns().name


@lru_cache(maxsize=_CATALOGUES_KEPT)
def _shared(files: DataFiles, compiled: Path) -> Catalogue:
    """One catalogue for all who open the same files in this process; it cannot be changed."""
    meta = read_meta(compiled)
    if meta is None:
        raise UserError(f"{compiled} was removed while it was being opened; start again.")
    return Catalogue(files, compiled, meta, None)


def _reopen(files: DataFiles, compiled: Path, limit: int | None, digest: str, nouns: NounExtractor | None) -> Catalogue:
    """A catalogue in another process, perhaps on another machine."""
    return Catalogue(files, compiled, compiled_form_at(compiled, files, limit, digest), nouns)
