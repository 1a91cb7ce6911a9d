# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder: what can be made again at any time."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

from verl.utils.fs import atomic_write
from verl.utils.fs import user_cache_dir as cache_dir

__all__ = ["cache_dir", "read_cached", "write_cached"]

logger = logging.getLogger(__name__)


def read_cached(path: Path) -> bytes | None:
    """The content of a cache file; None when there is none or it is damaged."""
    try:
        return zlib.decompress(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, zlib.error) as error:
        logger.warning("the cache file %s cannot be read (%s); it is made again", path, error)
        return None


def write_cached(path: Path, content: bytes) -> None:
    """Write a cache file whole. Writers of equal content may race; a folder that cannot be written costs time only."""
    try:
        atomic_write(path, zlib.compress(content, 1))
    except OSError as error:
        logger.warning("cannot write the cache file %s (%s); its content will be computed again", path, error)
