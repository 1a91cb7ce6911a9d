# SPDX-License-Identifier: Apache-2.0
"""What command-line programs without Hydra share: one-line errors, exit statuses, early checks of outputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from verl.utils.errors import UserError
from verl.utils.fs import remove_leftovers

__all__ = ["check_output", "run_program"]


def run_program(body: Callable[[], int], *, also: tuple[type[Exception], ...] = (), on_interrupt: str = "") -> int:
    """Run the body of a program after its arguments are parsed; returns the exit status.

    A `UserError`, a file that cannot be read or written (`OSError`) and the exceptions in `also` become one line
    `error: ...` on stderr and status 2; Ctrl-C becomes one line and 130. Anything else is a bug and keeps its
    traceback.

    Args:
        body: does the work and returns the status.
        on_interrupt: what the user should know after Ctrl-C.
    """
    expected: tuple[type[Exception], ...] = (UserError, *also)
    try:
        return body()
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {on_interrupt or 'nothing was written'}\n")
        return 130
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except expected as error:
        text = str(error)
    sys.stderr.write(f"error: {' '.join(text.split())}\n")
    return 2


def check_output(path: str | Path, option: str, *, folder: bool = False) -> Path:
    """Refuse an output that could not be written, before the work for it is done; returns it with `~` expanded.

    Temporary files that killed runs left of this output are removed.

    Args:
        option: names the argument in messages.
        folder: the output is a folder, not a file. Missing parents are fine in both cases.

    Raises:
        UserError: a folder is in a file's place or the reverse, or writing there is not allowed.
    """
    target = Path(path).expanduser()
    if target.exists() and target.is_dir() != folder:
        raise UserError(f"{option} {path} is a {'file; name a folder' if folder else 'folder; name a file'}.")
    place = target if folder else target.parent
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{option} {path}: {place} is a file, so nothing can be put below it; choose another place.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{option} {path}: writing in {place} is not allowed; choose another place.")
    remove_leftovers(target)
    return target
