# SPDX-License-Identifier: Apache-2.0
"""The nouns of product titles, which the reward compares: from a table, a spaCy model, or all words of some size."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from agent_system.environments.env_package.webshop.analyzer import STOP_WORDS
from verl.utils.errors import UserError

__all__ = ["ContentWords", "NounExtractor", "NounTable", "SpacyNouns", "default_nouns"]

logger = logging.getLogger(__name__)

_MODELS = ("en_core_web_sm", "en_core_web_lg", "en_core_web_md")
"""spaCy models looked for; the first is the one that WebShop's code loads."""
_PROBE = "a wooden table lamp"
_WORD = re.compile(r"[^\W\d_]{2,}(?:['\u2019-][^\W\d_]+)*")
_NO_NOUNS = STOP_WORDS | frozenset(
    (
        "our", "your", "its", "his", "her", "my", "we", "you", "he", "she", "from", "up", "out", "all", "any",
        "each", "other", "more", "most", "can", "you", "off", "over", "than", "only", "also", "x", "pcs", "pack",
        "set",
    )
)  # fmt: skip


class NounExtractor(Protocol):
    """Finds the nouns of a title. Picklable, and equal in every process."""

    @property
    def name(self) -> str:
        """For the record of a run."""
        ...

    def nouns(self, asin: str, title: str) -> Sequence[str]:
        """Nouns and proper nouns of a product's title in lower case, repeated as often as they occur."""
        ...


class NounTable:
    """Nouns listed in advance, by asin."""

    def __init__(self, table: Mapping[str, Sequence[str]], name: str = "table") -> None:
        self._table = {asin: tuple(nouns) for asin, nouns in table.items()}
        self._name = name

    @classmethod
    def from_file(cls, path: Path) -> NounTable:
        """Read a JSON object asin -> list of nouns.

        Raises:
            UserError: the file has another form.
        """
        form = "it must map asins to lists of nouns"
        try:
            table = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path} is unreadable ({error}); {form}.") from error
        if not isinstance(table, dict):
            raise UserError(f"{path} holds a {type(table).__name__}; {form}.")
        for asin, nouns in table.items():
            if not isinstance(nouns, list) or not all(isinstance(noun, str) for noun in nouns):
                raise UserError(f"{path}: {asin} has {str(nouns)[:40]!r}; {form}.")
        return cls(table, f"table:{path.name}")

    @property
    def name(self) -> str:
        return self._name

    def nouns(self, asin: str, title: str) -> Sequence[str]:
        """The listed nouns.

        Raises:
            UserError: the table lacks the product.
        """
        try:
            return self._table[asin]
        except KeyError:
            raise UserError(f"The table of title nouns ({self._name}) has no product {asin}.") from None


class SpacyNouns:
    """Tokens that a spaCy model tags NOUN or PROPN, as WebShop does it."""

    def __init__(self, model: str) -> None:
        """
        Args:
            model: name of an installed model; loaded on first use.
        """
        self._model = model

    @property
    def name(self) -> str:
        return f"spacy:{self._model}"

    def nouns(self, asin: str, title: str) -> Sequence[str]:
        return _tagged_nouns(self._model, title)


class ContentWords:
    """All words of a title but small ones and numbers: no nouns, yet free of models.

    The reward's title score then differs from WebShop's for about one in ten wrong purchases; the right one is always
    recognised.
    """

    @property
    def name(self) -> str:
        return "content_words"

    def nouns(self, asin: str, title: str) -> Sequence[str]:
        return [word for word in _WORD.findall(title.lower()) if word not in _NO_NOUNS]


@lru_cache(maxsize=1)
def default_nouns() -> NounExtractor:
    """An installed spaCy model that works, else content words, with a warning; looked for once per process."""
    problem = "no spaCy model is installed"
    for model in _MODELS:
        if importlib.util.find_spec("spacy") is None or importlib.util.find_spec(model) is None:
            continue
        try:
            # Loaded now: a run must not find out at its first purchase.
            if _tagged_nouns(model, _PROBE):
                return SpacyNouns(model)
            cause = "it tags no nouns"
        except Exception as error:  # noqa: BLE001 - models of other versions fail in many ways, inside spaCy
            cause = f"{type(error).__name__}: {error}"
        problem = f"the spaCy model {model} cannot be used ({cause})"
    logger.warning(
        "%s: the WebShop reward compares the words of titles instead of their nouns, so that some wrong purchases "
        "score differently; for the original's scores install spacy and run `python -m spacy download %s`",
        problem,
        _MODELS[0],
    )
    return ContentWords()


@lru_cache(maxsize=2)
def _load_model(model: str) -> Any:
    import spacy

    return spacy.load(model)


@lru_cache(maxsize=4096)
def _tagged_nouns(model: str, title: str) -> tuple[str, ...]:
    return tuple(token.text.lower() for token in _load_model(model)(title) if token.pos_ in ("NOUN", "PROPN"))
