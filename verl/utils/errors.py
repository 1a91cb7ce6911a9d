# SPDX-License-Identifier: Apache-2.0
"""The one exception that means: the user can fix this."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(ValueError):
    """A mistake in what the program was given: a config key, a path, a file, a combination.

    The message is one clear sentence (or two) naming the thing, the place and the way out. Entry programs
    print it as one line and exit with status 2, without a traceback.
    """
