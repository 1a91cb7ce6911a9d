# SPDX-License-Identifier: Apache-2.0
"""One untrained discriminator for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipe.traj_evolve.support import make_discriminator


@pytest.fixture(scope="session")
def discriminator_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never write into it."""
    return make_discriminator(tmp_path_factory.mktemp("discriminator") / "hf")
