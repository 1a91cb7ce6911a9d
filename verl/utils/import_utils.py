# SPDX-License-Identifier: Apache-2.0
"""Importing the user's own modules."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from verl.utils.errors import UserError

__all__ = ["import_external_libs"]


def import_external_libs(
    external_libs: str | Sequence[str] | None, config_key: str = "actor_rollout_ref.model.external_lib"
) -> None:
    """Import one module or several, in order; None imports nothing.

    Raises:
        UserError: a module does not exist; names `config_key`. Errors inside a module travel unchanged.
    """
    names = (external_libs,) if isinstance(external_libs, str) else external_libs or ()
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            raise UserError(
                f"{config_key} names {name!r}, but no module {error.name!r} can be imported; check the spelling, or "
                "install the package that holds it"
            ) from error
