# SPDX-License-Identifier: Apache-2.0
"""Folders of generated data: written whole or not at all, recognised again, never overwritten."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir

__all__ = ["GENERATION_FILE", "identity_hash", "write_generated"]

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation.json"
"""Record of how a folder was made; its presence says that the data is generated."""


def identity_hash(identity: Mapping[str, Any]) -> str:
    """Twelve hex digits that name what is generated."""
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def write_generated(
    out: str | Path,
    identity: Mapping[str, Any],
    things: str,
    write: Callable[[Path], Mapping[str, Any]],
    changed: Callable[[Path, Mapping[str, str]], Path | None],
) -> Path:
    """Make the folder `out`; nothing is done when it holds the same generation already.

    The folder appears under its name only when complete, with a `GENERATION_FILE` that holds `identity` and what
    `write` returned. Several processes may make the same folder at once.

    Args:
        out: it must not exist, be empty, or hold the same generation.
        identity: what determines the content; JSON types.
        things: what is generated, for messages, in the plural.
        write: fills an empty folder; returns more for the record, `hashes` (name -> digest) among it.
        changed: given a folder and the recorded `hashes`, the first path whose content has another digest, or None.

    Returns:
        `out` as a path.

    Raises:
        UserError: `out` holds something else, or is the current folder.
    """
    target = Path(out).expanduser()
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; name a folder for the generated {things}.")
    if target.is_dir() and any(target.iterdir()):
        _check_same(target, identity, things, changed)
        logger.info("%s holds these %s already", target, things)
        return target
    if target.is_dir() and target.samefile(Path.cwd()):
        # It would be replaced by another folder of that name while the caller is inside.
        raise UserError(f"{out} is the folder you are in; name a folder to make for the generated {things}.")
    try:
        with atomic_dir(target) as folder:
            record = {**identity, **write(folder)}
            text = json.dumps(record, indent=2) + "\n"
            (folder / GENERATION_FILE).write_text(text, encoding="utf-8", newline="\n")
    except FileExistsError:
        # Another process finished this folder in the meantime.
        _check_same(target, identity, things, changed)
    return target


def _check_same(
    target: Path,
    identity: Mapping[str, Any],
    things: str,
    changed: Callable[[Path, Mapping[str, str]], Path | None],
) -> None:
    record = target / GENERATION_FILE
    way_out = "name another folder, or remove this one"
    if not record.is_file():
        raise UserError(f"The folder {target} is not empty and holds no generated {things}; {way_out}.")
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        same = {key: found[key] for key in identity} == dict(identity)
        hashes = dict(found["hashes"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record} is unreadable ({error}); {way_out}.") from error
    if not same:
        raise UserError(f"The folder {target} holds {things} generated with other options ({record}); {way_out}.")
    path = changed(target, hashes)
    if path is not None:
        raise UserError(f"The {things} in {path} were changed after generation; {way_out}.")
