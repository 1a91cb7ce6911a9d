# SPDX-License-Identifier: Apache-2.0
"""From a config tree to frozen dataclasses: unknown keys, types, ranges and choices are checked here, once."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.fields import NULL_MEANS_DEFAULT, Range, RootConfig
from verl.utils.errors import UserError

__all__ = ["build_config", "key_paths", "nearest_key", "unknown_key_message"]

T = TypeVar("T")
_NEAR_ENOUGH = 0.6


def build_config(
    cls: type[T], cfg: DictConfig | Mapping[str, Any], extra_sections: Mapping[str, type] | None = None
) -> T:
    """Build the dataclass `cls` from a composed config or a plain mapping.

    For a whole config (`PPOConfig`, `SFTConfig`) the tree is laid over the defaults of its YAML file, so a partial
    mapping works and interpolated keys follow the keys they copy; then `normalized()` is applied. Elsewhere a missing
    key takes the field's default. Lists become tuples; text that spells a number or a truth value is converted where
    one is expected.

    Args:
        cls: a dataclass of `verl.trainer.config.schema`, or a recipe's own.
        cfg: the tree; interpolations are resolved.
        extra_sections: section name -> dataclass of sections that a recipe adds at the top level; the instances
            are found in `.extra`. A section missing in the tree takes the defaults of its dataclass.

    Raises:
        UserError: unknown key (with the nearest valid one), wrong type, value out of range, unknown choice, a value
            that is missing or cannot be interpolated. The message names the full key.
    """
    sections = dict(extra_sections or {})
    if sections and not issubclass(cls, RootConfig):
        raise TypeError(f"extra_sections belong to a whole config, not to {cls.__name__}")
    tree = _resolved_tree(cls, cfg)
    builder = _Builder(lambda: key_paths(cls, sections))
    if not issubclass(cls, RootConfig):
        return cast(T, builder.section(cls, tree, ""))
    extra = {name: builder.section(section, tree.pop(name, {}), name) for name, section in sections.items()}
    root: RootConfig = builder.section(cls, tree, "", given={"extra": extra})
    return cast(T, root.normalized())


def key_paths(cls: type, extra_sections: Mapping[str, type] | None = None) -> tuple[str, ...]:
    """Every key of `cls` and of the extra sections as dotted paths, sections included."""
    paths: list[str] = []

    def walk(section: type, prefix: str) -> None:
        for spec in _specs(section):
            path = f"{prefix}{spec.name}"
            paths.append(path)
            nested = _section_class(_hints(section)[spec.name])
            if nested is not None:
                walk(nested, f"{path}.")

    walk(cls, "")
    for name, section in (extra_sections or {}).items():
        paths.append(name)
        walk(section, f"{name}.")
    return tuple(paths)


def nearest_key(key: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest to `key` in its whole path and in its last part; None when nothing is close."""
    leaf = key.rpartition(".")[2]

    def closeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, leaf, candidate.rpartition(".")[2]).ratio()
        return (whole + last) / 2

    best = max(candidates, key=closeness, default=None)
    return best if best is not None and closeness(best) >= _NEAR_ENOUGH else None


def unknown_key_message(key: str, candidates: Iterable[str]) -> str:
    """The sentence for a key that does not exist."""
    near = nearest_key(key, candidates)
    if near is None:
        return f"unknown config key {key}; --cfg job prints every valid key."
    return f"unknown config key {key}; did you mean {near}?"


def _resolved_tree(cls: type, cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    try:
        tree = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
        if issubclass(cls, RootConfig):
            tree = cast(DictConfig, OmegaConf.merge(_defaults(cls.config_name), tree))
        return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        place = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"config: {place}{reason}") from error


@cache
def _defaults(config_name: str) -> DictConfig:
    """The tree of a YAML file beside this module; `OmegaConf.merge` copies it."""
    return cast(DictConfig, OmegaConf.load(Path(__file__).with_name(f"{config_name}.yaml")))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _specs(cls: type) -> tuple[Field[Any], ...]:
    """The fields of a section that are keys."""
    hidden = {"extra"} if issubclass(cls, RootConfig) else set()
    return tuple(spec for spec in fields(cls) if spec.name not in hidden)


def _section_class(hint: Any) -> type | None:
    """The dataclass behind a hint (also `Section | None`), or None for a leaf."""
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


class _MismatchError(Exception):
    """A value does not fit; the text says what was expected."""


@dataclass(frozen=True)
class _Builder:
    """Builds sections; `candidates` lists all valid keys and is called only for an error message."""

    candidates: Callable[[], tuple[str, ...]]

    def section(self, cls: type, tree: Any, prefix: str, given: Mapping[str, Any] | None = None) -> Any:
        if not isinstance(tree, Mapping):
            raise UserError(f"{prefix}={_shown(tree)}: expected a section with keys, not a single value.")
        values: dict[str, Any] = dict(given or {})
        specs = {spec.name: spec for spec in _specs(cls)}
        for name in tree:
            if name not in specs:
                path = f"{prefix}.{name}" if prefix else str(name)
                raise UserError(unknown_key_message(path, self.candidates()))
        for name, value in tree.items():
            path = f"{prefix}.{name}" if prefix else name
            if value is None and specs[name].metadata == NULL_MEANS_DEFAULT:
                continue
            values[name] = self.value(value, _hints(cls)[name], path)
        return cls(**values)

    def value(self, value: Any, hint: Any, path: str) -> Any:
        nested = _section_class(hint)
        if nested is not None:
            return None if value is None and type(None) in get_args(hint) else self.section(nested, value, path)
        try:
            return _convert(value, hint)
        except _MismatchError as error:
            raise UserError(f"{path}={_shown(value)}: expected {error}.") from None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return repr(value) if value == "" or not isinstance(value, str) else value


def _convert(value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin is Annotated:
        base, limits = get_args(hint)
        return _in_range(_convert(value, base), limits, base)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint))
    if origin is Literal:
        return _choice(value, get_args(hint))
    if origin is tuple:
        return _sequence(value, get_args(hint))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _MismatchError("a section with keys")
        return dict(value)
    return _SCALARS[hint](value)


def _convert_union(value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and type(None) in options:
        return None
    expected = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _convert(value, option)
        except _MismatchError as error:
            expected.append(str(error))
    if type(None) in options:
        expected.append("null")
    raise _MismatchError(" or ".join(expected))


def _in_range(value: float, limits: Range, base: type) -> float:
    if not limits.accepts(value):
        raise _MismatchError(f"{_NAMES[base]} of {limits}" if not limits.strict else f"{_NAMES[base]} {limits}")
    return value


def _choice(value: Any, options: tuple[Any, ...]) -> Any:
    if value in options and not isinstance(value, bool):
        return value
    near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise _MismatchError(f"one of {', '.join(str(option) for option in options)}{hint}")


def _sequence(value: Any, element_hints: tuple[Any, ...]) -> tuple[Any, ...]:
    repeated = len(element_hints) == 2 and element_hints[1] is Ellipsis
    if isinstance(value, str) and repeated:
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise _MismatchError("a list")
    if repeated:
        return tuple(_convert(item, element_hints[0]) for item in value)
    if len(value) != len(element_hints):
        raise _MismatchError(f"a list of {len(element_hints)} values")
    return tuple(_convert(item, hint) for item, hint in zip(value, element_hints, strict=True))


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    spelled = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in spelled:
        return spelled[value.lower()]
    raise _MismatchError("True or False")


def _as_int(value: Any) -> int:
    number = _as_number(value, int)
    if not number.is_integer():
        raise _MismatchError(_NAMES[int])
    return int(value) if isinstance(value, (int, str)) and not _looks_float(value) else int(number)


def _looks_float(value: int | str) -> bool:
    return isinstance(value, str) and any(mark in value.lower() for mark in ".e")


def _as_float(value: Any) -> float:
    number = _as_number(value, float)
    if math.isnan(number):
        raise _MismatchError(_NAMES[float])
    return number


def _as_number(value: Any, base: type) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _MismatchError(_NAMES[base])
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise _MismatchError(_NAMES[base]) from None


def _as_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    # A run called 7 or 1.5 reads as a number in YAML.
    if isinstance(value, (int, float)):
        return str(value)
    raise _MismatchError("text")


_NAMES: dict[type, str] = {int: "an integer", float: "a number"}
_SCALARS: dict[Any, Callable[[Any], Any]] = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}
