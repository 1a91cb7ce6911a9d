# SPDX-License-Identifier: Apache-2.0
"""Reading configs outside of a Hydra program, and the one check that needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.builder import unknown_key_message
from verl.utils.errors import UserError

__all__ = ["check_device", "explain_overrides", "load_config"]


def load_config(
    config_name: str, overrides: Sequence[str] = (), config_module: str = "verl.trainer.config"
) -> DictConfig:
    """Compose the YAML `config_name` of `config_module` with command-line `overrides`, as a Hydra program does.

    Raises:
        UserError: an override that is not of the form key=value, names an unknown key (the message gives the nearest
            valid one) or adds with `+` a key that has a value; anything else Hydra refuses.
    """
    try:
        return _compose(config_name, overrides, config_module)
    except (HydraException, OmegaConfBaseException) as error:
        explain_overrides(config_name, overrides, config_module)
        raise UserError(f"{config_name}: {' '.join(str(error).split())}") from error


def _compose(config_name: str, overrides: Sequence[str], config_module: str) -> DictConfig:
    """`load_config` with Hydra's own exceptions. A Hydra program's global state is kept."""
    saved = GlobalHydra.instance().hydra
    try:
        GlobalHydra.instance().clear()
        with initialize_config_module(config_module=config_module, version_base=None):
            return compose(config_name=config_name, overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = saved


def explain_overrides(config_name: str, overrides: Sequence[str], config_module: str) -> None:
    """Raise UserError for the first override whose form or key is wrong."""
    try:
        tree = _compose(config_name, [], config_module)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"config {config_name} of {config_module}: {' '.join(str(error).split())}") from error
    known = _keys(tree)
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            hint = "" if "=" in text else " (an override has the form key=value)"
            reason = str(error).splitlines()[0]
            raise UserError(f"cannot read the override '{text}'{hint}: {reason}") from error
        _explain_key(override, text, tree, known)


def _explain_key(override: Override, text: str, tree: DictConfig, known: dict[str, bool]) -> None:
    key = override.key_or_group
    if key.split(".")[0].split("/")[0] == "hydra" or override.package is not None:
        return
    if override.type == OverrideType.ADD and known.get(key):
        raise UserError(f"'{text}': {key} exists already; write it without the leading +.")
    if override.type not in (OverrideType.CHANGE, OverrideType.DEL) or key in known:
        return
    parent = key.rpartition(".")[0]
    if parent in known and OmegaConf.select(tree, parent) == {}:
        raise UserError(f"'{text}': {parent} has no key {key.rpartition('.')[2]} yet; add it with +{text}.")
    raise UserError(unknown_key_message(key, known))


def _keys(tree: DictConfig) -> dict[str, bool]:
    """Every dotted key of `tree` -> whether it holds a single value or a list (not null, not a section)."""
    found: dict[str, bool] = {}

    def walk(node: object, prefix: str) -> None:
        if not isinstance(node, dict):
            return
        for name, value in node.items():
            path = f"{prefix}{name}"
            found[path] = value is not None and not isinstance(value, (dict, list))
            walk(value, f"{path}.")

    walk(OmegaConf.to_container(tree, resolve=False), "")
    return found


def check_device(device: str) -> Literal["cuda", "cpu"]:
    """The device to run on for `trainer.device`; "auto" is CUDA where there is a device.

    Raises:
        UserError: CUDA is asked for and torch sees no CUDA device.
    """
    import torch

    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    if device == "cuda" and not available:
        raise UserError("trainer.device=cuda but torch sees no CUDA device; set trainer.device=cpu to run without one.")
    return cast(Literal["cuda", "cpu"], device)
