# SPDX-License-Identifier: Apache-2.0
"""The body of a chat completion -> text and token counts. Everything in it is data from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["MAX_CHARS", "ODDITIES", "Answer", "UnusableAnswer", "error_text", "parse_answer"]

MAX_CHARS = 65_536
"""Texts are cut here: an endpoint that ignores `max_tokens` must not fill prompts and files."""

ODDITIES = (
    "empty_choices", "no_message", "null_content", "tool_calls_only", "not_text", "empty_text", "cut_text",
    "refused_prompt",
)  # fmt: skip
"""What an answer can have instead of a text; all but `cut_text` are played as the empty text, an invalid action."""

_MAX_TOKENS = 10**9


class UnusableAnswer(ValueError):
    """The body is no chat completion at all; asking again may help."""


@dataclass(frozen=True)
class Answer:
    """What the model said."""

    text: str
    oddity: str | None = None
    """One of `ODDITIES`, None for an ordinary text."""
    prompt_tokens: int | None = None
    """As the endpoint counts; None where it does not say."""
    completion_tokens: int | None = None
    at_token_limit: bool = False
    """The endpoint stopped at `max_tokens`."""


def parse_answer(body: bytes) -> Answer:
    """Read a chat completion.

    Raises:
        UnusableAnswer: no JSON object with a list of choices.
    """
    data = _decode(body)
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        raise UnusableAnswer("the answer is no chat completion")
    choice = data["choices"][0] if data["choices"] else None
    text, oddity = _text_of(choice) if data["choices"] else ("", "empty_choices")
    # A lone surrogate can neither be printed nor sent back in the next prompt.
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) > MAX_CHARS:
        text, oddity = text[:MAX_CHARS], "cut_text"
    usage = data.get("usage")
    prompt, completion = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    at_limit = isinstance(choice, dict) and choice.get("finish_reason") == "length"
    return Answer(text, oddity, prompt, completion, at_limit)


def error_text(body: bytes, secret: str = "") -> str:
    """The endpoint's own words in one printable line of at most 300 characters, without `secret`."""
    try:
        data = _decode(body)
    except UnusableAnswer:
        data = None
    found = data.get("error", data.get("detail", data.get("message"))) if isinstance(data, dict) else None
    if isinstance(found, dict):
        found = found.get("message", found)
    text = body.decode("utf-8", "replace") if found is None else str(found)
    if secret:
        # Before the cut, which could leave the first half of it.
        text = text.replace(secret, "***")
    printable = "".join(char if char.isprintable() else " " for char in text[:2000])
    return " ".join(printable.split())[:300] or "(empty)"


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnusableAnswer(f"the answer is not JSON ({reason[:100]})") from error


def _text_of(choice: Any) -> tuple[str, str | None]:
    """(text, oddity) of one choice."""
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return "", "no_message"
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is None:
        return "", "tool_calls_only" if message.get("tool_calls") else "null_content"
    if not isinstance(content, str):
        return "", "not_text"
    if not content and message.get("tool_calls"):
        return "", "tool_calls_only"
    return content, None if content else "empty_text"


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value <= _MAX_TOKENS else None
