# SPDX-License-Identifier: Apache-2.0
"""Shops for the tests: a generated one, and the original's thousand products where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.generate import generate_catalogue
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.nouns import NounTable


@pytest.fixture(scope="session")
def shop_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled catalogues are kept, away from the user's cache."""
    return tmp_path_factory.mktemp("shop_cache")


@pytest.fixture(scope="session")
def generated_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated shop of the default size."""
    return generate_catalogue(tmp_path_factory.mktemp("shop") / "generated")


@pytest.fixture(scope="session")
def catalogue(generated_dir: Path, shop_cache: Path) -> Catalogue:
    return Catalogue.load(generated_dir, cache_dir=shop_cache)


@pytest.fixture(scope="session")
def goals(catalogue: Catalogue) -> GoalSet:
    return GoalSet.load(catalogue)


@pytest.fixture(scope="session")
def original_dir(shared_dir: Path) -> Path:
    return shared_dir / "data" / "webshop"


@pytest.fixture(scope="session")
def original(original_dir: Path, shared_dir: Path, shop_cache: Path) -> Catalogue:
    """The original's products, with the nouns that the recorded rewards used."""
    nouns = NounTable.from_file(shared_dir / "compat" / "golden" / "webshop_title_nouns.json")
    return Catalogue.load(original_dir, nouns=nouns, cache_dir=shop_cache)
