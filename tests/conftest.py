# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests. Heavy packages are imported by the fixtures that need them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What programs cache goes into a folder of this session, not into the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray instance of four logical CPUs for the whole session, ended with it."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=512 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the repository: reference data that is not part of it."""
    path = REPO_ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"no reference data: {path} does not exist")
    return path


# ---- tiny model (built by tests/helpers/tiny.py) ----


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a random two-layer model and its tokenizer; shared by the session, so never write into it."""
    from tests.helpers.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny_model") / "hf")
