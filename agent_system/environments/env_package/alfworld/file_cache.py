# SPDX-License-Identifier: Apache-2.0
"""What a process made of game files lately."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from verl.utils.errors import UserError

__all__ = ["FileCache"]

Made = TypeVar("Made")


class FileCache(Generic[Made]):
    """The things made of the files used last, by path, time and size: a changed file is read again.

    Args:
        make: path -> thing; what it raises is not kept.
        size: how many things are kept.
    """

    def __init__(self, make: Callable[[str | Path], Made], size: int) -> None:
        self._make = make
        self._size = size
        self._made: OrderedDict[tuple[str, int, int], Made] = OrderedDict()

    def get(self, path: str | Path) -> Made:
        """The thing made of a file.

        Raises:
            UserError: the file does not exist.
        """
        try:
            stat = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
            raise UserError(
                f"The game file {path} does not exist; download the ALFWorld data or generate games "
                "(python -m agent_system.environments.env_package.alfworld.generate_games --help)."
            ) from error
        key = (os.path.abspath(path), stat.st_mtime_ns, stat.st_size)
        if key not in self._made:
            self._made[key] = self._make(path)
            if len(self._made) > self._size:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()
