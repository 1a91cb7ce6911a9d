# SPDX-License-Identifier: Apache-2.0
"""Local files: writes that are whole or absent, and checks of paths that name the config key they came from."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.utils.errors import UserError

__all__ = [
    "atomic_dir",
    "atomic_write",
    "copy",
    "copy_local_path_from_hdfs",
    "copy_to_local",
    "exists",
    "file_hash",
    "is_hdfs_path",
    "is_hf_id",
    "makedirs",
    "remove_leftovers",
    "require_dir",
    "require_file",
    "user_cache_dir",
]

logger = logging.getLogger(__name__)

# `name` or `owner/name`, as the Hugging Face hub spells its ids.
_HF_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
# Names of temporary files and folders: of `name`, by process `pid`; `old` holds what a replaced folder had.
_TEMPORARY = re.compile(r"\.?(?P<name>.+)\.tmp-(?P<old>old-)?(?P<pid>\d+)-[a-z0-9_]{8}")
# Of a rename to something else than an empty folder.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_FILE_MODE = 0o666
_DIR_MODE = 0o777
_BLOCK = 1 << 20


def _current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable; file systems that cannot sync a folder are left alone."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def atomic_write(path: str | Path, data: str | bytes) -> None:
    """Write `data` (text as UTF-8) to `path` so that a reader sees the old file or the new one, never a part.

    Missing parent folders are created. When writing fails the old file stays, no temporary file is left and the
    error is raised.
    """
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    payload = data.encode("utf-8") if isinstance(data, str) else data
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.tmp-{os.getpid()}-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(payload)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, _FILE_MODE & ~_current_umask())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


@contextmanager
def atomic_dir(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder `{path}.tmp-*` beside `path`; it gets the name `path` when the block ends without error.

    On an error inside the block the temporary folder is removed and `path` is as it was. What exists already is
    replaced only with `overwrite=True` (it is moved aside first and removed after the rename) or if it is an empty
    folder. The content is on the disk before the rename. Of several processes that make one folder without
    `overwrite`, the first to finish wins, and no reader sees its folder change or vanish.

    Raises:
        FileExistsError: `path` exists, is no empty folder and `overwrite` is False, be it that another process made it
            in the meantime; with `overwrite` only if another process put one there during the swap.
    """
    target = Path(path).expanduser()
    if not overwrite and _is_taken(target):
        raise _exists_already(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-{os.getpid()}-", dir=target.parent))
    try:
        temporary.chmod(_DIR_MODE & ~_current_umask())
        yield temporary
        _sync_tree(temporary)
        if overwrite:
            _swap_in(temporary, target)
        else:
            _rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def _is_taken(path: Path) -> bool:
    """Whether something is there that a folder cannot be renamed to: anything but an empty folder."""
    try:
        return any(path.iterdir())
    except FileNotFoundError:
        return path.is_symlink()
    except NotADirectoryError:
        return True


def _exists_already(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists already; choose another folder or remove it first.")


def _sync_tree(folder: Path) -> None:
    """Put all content on the disk: a rename that outlives a power failure must not name files full of zeros."""
    for place, _, names in os.walk(folder):
        for name in names:
            if not os.path.islink(path := os.path.join(place, name)):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        _sync_folder(Path(place))


def _rename(folder: Path, target: Path) -> None:
    try:
        os.replace(folder, target)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _exists_already(target) from error
        raise


def _swap_in(temporary: Path, target: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-old-{os.getpid()}-", dir=target.parent))
    aside = old / target.name
    try:
        # Another process may have moved it in the meantime.
        with suppress(FileNotFoundError):
            os.replace(target, aside)
        _rename(temporary, target)
    except BaseException:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(path: str | Path) -> None:
    """Remove what killed processes left of `atomic_write` and `atomic_dir`, for `path` and for the files in it.

    Call it before writing there. Temporary files of processes that are alive stay. A folder that was killed away
    between the two renames of a replacement gets its old content back.
    """
    target = Path(path).expanduser()
    beside = target.parent.iterdir() if target.parent.is_dir() else iter(())
    found = [item for item in beside if item.name.lstrip(".").startswith(f"{target.name.lstrip('.')}.tmp-")]
    # Another process may take the folder away while this one looks.
    with suppress(FileNotFoundError, NotADirectoryError):
        found += target.iterdir()
    for item in found:
        match = _TEMPORARY.fullmatch(item.name)
        if match is None or _is_running(int(match["pid"])):
            continue
        home = item.parent / match["name"]
        if match["old"] and not home.exists() and (item / home.name).exists():
            # Another process may do the same.
            with suppress(FileNotFoundError, FileExistsError):
                _rename(item / home.name, home)
        logger.info("removing %s, left by a process that was killed", item)
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    """Whether another process of this machine has this number; our own number is an earlier process's."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def file_hash(path: str | Path) -> str:
    """Hex SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def user_cache_dir() -> Path:
    """$XDG_CACHE_HOME/trajevolve, else ~/.cache/trajevolve: for what can be made again at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trajevolve"


def is_hdfs_path(path: str) -> bool:
    """Whether `path` names a remote file system, which this version does not read or write."""
    return path.startswith(("hdfs://", "viewfs://"))


def is_hf_id(path: str) -> bool:
    """Whether `path` has the form of a Hugging Face id (`name` or `owner/name`) and is not written as a path."""
    return _HF_ID.fullmatch(path) is not None


def require_dir(path: str | Path, key: str) -> Path:
    """The existing folder `path` (with `~` expanded); UserError naming `key` and the path otherwise."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{key}={path}: the folder {folder} {kind}; set {key} to an existing folder.")
    return folder


def require_file(path: str | Path, key: str) -> Path:
    """The existing, readable file `path` (with `~` expanded); UserError naming `key` and the path otherwise."""
    file = Path(path).expanduser()
    if not file.is_file():
        kind = "is not a file" if file.exists() else "does not exist"
        raise UserError(f"{key}={path}: the file {file} {kind}; set {key} to an existing file.")
    if not os.access(file, os.R_OK):
        raise UserError(f"{key}={path}: the file {file} cannot be read; check its permissions.")
    return file


def copy_to_local(path: str | Path, key: str = "path") -> str:
    """Resolve a model or data location to something `from_pretrained` or an open call understands.

    An existing local path comes back with `~` expanded, a Hugging Face id comes back unchanged (loading it is the
    hub client's business, which honours HF_HUB_OFFLINE).

    Raises:
        UserError: the path is remote (hdfs), or looks like a local path and does not exist; names `key`.
    """
    text = str(path)
    if not text:
        raise UserError(f"{key} is empty; set it to a local folder or a Hugging Face id.")
    if is_hdfs_path(text):
        raise UserError(f"{key}={text}: hdfs locations are not supported; copy the files to a local folder first.")
    local = Path(text).expanduser()
    if local.exists():
        return str(local)
    # `outputs/model` has the form of an id; where the folder `outputs` exists, a local path is meant.
    meant_locally = "/" in text and local.parent.is_dir()
    if meant_locally or not is_hf_id(text):
        raise UserError(
            f"{key}={text}: {local} does not exist; set {key} to an existing local folder or a Hugging Face id "
            "(owner/name)."
        )
    return text


copy_local_path_from_hdfs = copy_to_local
"""The reference's older name of the same function."""


def _local(path: str | Path) -> Path:
    if is_hdfs_path(str(path)):
        raise UserError(f"{path}: remote folders are not supported; copy the files to a local folder first")
    return Path(path).expanduser()


def exists(path: str | Path) -> bool:
    """Whether a local path exists. Raises UserError for a remote one."""
    return _local(path).exists()


def makedirs(name: str | Path, mode: int = 0o777, exist_ok: bool = False) -> None:
    """Make a local folder and its parents. Raises UserError for a remote one."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def copy(src: str | Path, dst: str | Path) -> str:
    """Copy a local file, or the content of a local folder into a folder; returns the destination.

    Raises:
        UserError: one of the two is remote.
    """
    source, target = _local(src), _local(dst)
    if source.is_dir():
        return str(shutil.copytree(source, target, dirs_exist_ok=True))
    return str(shutil.copy(source, target))
