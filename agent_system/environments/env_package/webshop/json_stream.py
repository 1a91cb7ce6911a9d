# SPDX-License-Identifier: Apache-2.0
"""Reads a large JSON list or object entry by entry, so that files of several gigabytes need little memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.utils.errors import UserError

__all__ = ["iter_list", "iter_object"]

_CHUNK = 1 << 22
_BLANKS = " \t\r\n"


class _Stream:
    """A text file with a window: `text[at:]` is what was read and not yet taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken = 0  # complete entries so far, for messages
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._ended = False
        try:
            self._file = path.open(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}).") from error

    def close(self) -> None:
        self._file.close()

    def error(self, problem: str) -> UserError:
        return UserError(
            f"{self.path}: {problem} after {self.taken} complete entries; the file is truncated or not the one "
            "WebShop's authors publish, get it again."
        )

    def peek(self) -> str:
        """The next character that is not a blank; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _BLANKS:
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def skip(self, *expected: str) -> str:
        """Take one character, which must be one of `expected`."""
        found = self.peek()
        if found not in expected or not found:
            wanted = " or ".join(repr(character) for character in expected)
            raise self.error(f"{wanted} expected, {repr(found) if found else 'the end of the file'} found")
        self._at += 1
        return found

    def end(self) -> None:
        """Nothing but blanks may follow."""
        found = self.peek()
        if found:
            raise self.error(f"the end of the file expected, {found!r} found")

    def value(self) -> Any:
        """Take one JSON value."""
        self.peek()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise self.error("values nested too deeply") from error
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                raise self.error(f"no valid JSON ({error.msg})") from error
            except ValueError as error:
                # Python reads no integer of more than a few thousand digits.
                raise self.error(f"a number that cannot be read ({error})") from error
            # A number at the end of the window may go on behind it; so may one before a point or an exponent.
            ends_here = end < len(self._text) and self._text[end] not in ".eE"
            if ends_here or not self._more():
                self._at = end
                return found

    def _more(self) -> bool:
        if self._ended:
            return False
        try:
            # Doubling keeps the work linear when one entry is larger than a chunk.
            chunk = self._file.read(max(_CHUNK, len(self._text) - self._at))
        except UnicodeDecodeError as error:
            raise self.error("text that is not UTF-8") from error
        self._text = self._text[self._at :] + chunk
        self._at = 0
        self._ended = not chunk
        return bool(chunk)


def iter_list(path: Path) -> Iterator[Any]:
    """The elements of the JSON list in a file.

    Raises:
        UserError: the file is missing, not a list, ends too early, or does not end behind the list.
    """
    stream = _Stream(path)
    try:
        stream.skip("[")
        if stream.peek() == "]":
            stream.skip("]")
        else:
            yield stream.value()
            stream.taken += 1
            while stream.skip(",", "]") == ",":
                yield stream.value()
                stream.taken += 1
        stream.end()
    finally:
        stream.close()


def iter_object(path: Path) -> Iterator[tuple[str, Any]]:
    """The (key, value) pairs of the JSON object in a file, in order.

    Raises:
        UserError: the file is missing, not an object, ends too early, or does not end behind the object.
    """
    stream = _Stream(path)
    try:
        stream.skip("{")
        if stream.peek() == "}":
            stream.skip("}")
        else:
            yield _pair(stream)
            while stream.skip(",", "}") == ",":
                yield _pair(stream)
        stream.end()
    finally:
        stream.close()


def _pair(stream: _Stream) -> tuple[str, Any]:
    if stream.peek() != '"':
        raise stream.error("a key in quotes expected")
    key = stream.value()
    stream.skip(":")
    pair = key, stream.value()
    stream.taken += 1
    return pair
