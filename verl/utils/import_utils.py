# SPDX-License-Identifier: Apache-2.0
"""Importing the user's own modules."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from verl.utils.errors import UserError
from verl.utils.fs import require_file

__all__ = ["deprecated", "import_external_libs", "is_installed", "load_extern_type"]

DecoratedT = TypeVar("DecoratedT", bound=Callable[..., Any])


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported; does not import it."""
    return importlib.util.find_spec(package) is not None


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


def load_extern_type(file_path: str | Path, type_name: str | None, config_key: str = "custom_cls") -> Any:
    """The object called `type_name` in a user's Python file; the file is run as a module of its own.

    Raises:
        UserError: the file is missing, cannot be imported as Python, or has no such name; names `config_key`.
    """
    file = require_file(file_path, f"{config_key}.path")
    spec = importlib.util.spec_from_file_location(f"user_module_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{config_key}.path={file_path}: {file} is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if type_name is None or not hasattr(module, type_name):
        raise UserError(f"{config_key}.name={type_name}: {file} defines no such name; set {config_key}.name to one")
    return getattr(module, type_name)


def deprecated(replacement: str = "") -> Callable[[DecoratedT], DecoratedT]:
    """Decorator for a function or class: using it gives a FutureWarning that names `replacement`."""

    def decorate(target: DecoratedT) -> DecoratedT:
        hint = f"; use {replacement} instead" if replacement else ""
        message = f"{target.__module__}.{target.__qualname__} is deprecated{hint}"
        called: Any = target.__init__ if inspect.isclass(target) else target

        @functools.wraps(called)
        def warn(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(message, FutureWarning, stacklevel=2)
            return called(*args, **kwargs)

        if inspect.isclass(target):
            setattr(target, "__init__", warn)  # noqa: B010
            return target
        return warn  # type: ignore[return-value]

    return decorate
