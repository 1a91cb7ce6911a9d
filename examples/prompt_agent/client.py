# SPDX-License-Identifier: Apache-2.0
"""One user message -> one answer of an OpenAI-compatible chat endpoint, with retries."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any

import httpx
import numpy as np

from examples.prompt_agent.answers import Answer, UnusableAnswer, error_text, parse_answer
from verl.utils.errors import UserError

__all__ = ["ChatClient", "Endpoint", "Retries", "backoff_generator"]

logger = logging.getLogger(__name__)

_PATH = "/chat/completions"
_MAX_BODY = 8 * 2**20
_MAX_RETRY_AFTER_S = 600.0
# Besides 5xx: request timeout, conflict, too early, too many requests.
_RETRIED = frozenset({408, 409, 425, 429})
# The request as such is wrong, or this one prompt is: too long, or not to the taste of a content filter.
_MAYBE_THE_PROMPT = frozenset({400, 413, 422})
_HARMLESS = "Hello"


@dataclass(frozen=True)
class Endpoint:
    """Where the model is and what is asked of it."""

    base_url: str
    """Up to and without `/chat/completions`; usually ends in `/v1`."""
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every request: `temperature`, `max_tokens`, ...; a null value leaves the entry out, also `seed`."""
    api_key: str = field(default="", repr=False)
    key_variable: str = "OPENAI_API_KEY"
    """Named in messages."""
    timeout_s: float = 120.0
    """For one whole answer."""

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: the address or the key cannot be used.
        """
        _check_url(self.base_url)
        if not self.api_key.isascii() or any(not char.isprintable() or char == " " for char in self.api_key):
            raise UserError(f"the key in {self.key_variable} has characters that no key has; set it again.")
        if self.timeout_s <= 0:
            raise UserError(f"--timeout {self.timeout_s}: must be above 0 seconds.")

    @property
    def url(self) -> str:
        """Address of the chat completions."""
        base = self.base_url.rstrip("/")
        return base if base.endswith(_PATH) else base + _PATH


def _check_url(text: str) -> None:
    try:
        url = httpx.URL(text)
        usable = url.scheme in ("http", "https") and bool(url.host)
    except httpx.InvalidURL:
        usable = False
    if not usable:
        # Not repeated: a mistyped address may hold a password.
        raise UserError("--base-url: not an address such as http://127.0.0.1:8000/v1 or https://host/v1.")
    if url.userinfo or url.query or url.fragment:
        raise UserError(
            "--base-url: give the plain address, without user, password, ? or #; a key belongs into an environment "
            "variable (--api-key-env)."
        )


@dataclass(frozen=True)
class Retries:
    """After failure k (from 0) wait `min(cap, base * 2**k)` seconds, times a random factor in [0.5, 1)."""

    limit: int = 8
    base_s: float = 1.0
    cap_s: float = 60.0

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: a negative number of retries.
        """
        if self.limit < 0:
            raise UserError(f"--max-retries {self.limit}: must be 0 or more.")

    def wait(self, attempt: int, retry_after: float, jitter: np.random.Generator) -> float:
        """Seconds to wait; at least as long as the endpoint asks for."""
        backoff = min(self.cap_s, self.base_s * 2.0 ** min(attempt, 30))
        return max(retry_after, backoff * float(jitter.uniform(0.5, 1.0)))


def backoff_generator(seed: int, episode: str, turn: int) -> np.random.Generator:
    """The random stream of the waits of one request."""
    digest = hashlib.blake2b(f"{seed}/back-off/{episode}/{turn}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class _Failure:
    """A request that may succeed when sent again."""

    reason: str
    retry_after: float = 0.0


class ChatClient(AbstractAsyncContextManager["ChatClient"]):
    """Keeps the connections of one endpoint; `async with` closes them."""

    def __init__(self, endpoint: Endpoint, retries: Retries, concurrency: int) -> None:
        self._endpoint = endpoint
        self._retries = retries
        self._has_answered = False
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if endpoint.api_key:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        # No timeout of its own: `_send` limits the whole answer, httpx would limit only each piece of it.
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=httpx.Limits(max_connections=concurrency))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, message: str, seed: int, jitter: np.random.Generator) -> tuple[Answer, int]:
        """The answer to one user message, and how many retries it took.

        Args:
            seed: sent as `seed`.
            jitter: random stream of the waits between retries.

        Raises:
            UserError: the endpoint refuses the request, or every try failed.
        """
        body, attempt = self._body(message, seed), 0
        while isinstance(result := await self._send(body), _Failure):
            if attempt == self._retries.limit:
                raise UserError(f"{self._endpoint.url} failed {attempt + 1} times, the last time: {result.reason}.")
            seconds = self._retries.wait(attempt, result.retry_after, jitter)
            attempt += 1
            logger.warning(
                "try %d of %d failed (%s); next in %.1f s", attempt, self._retries.limit + 1, result.reason, seconds
            )
            await asyncio.sleep(seconds)
        return result, attempt

    def _body(self, message: str, seed: int) -> bytes:
        messages = [{"role": "user", "content": message}]
        fields = {"model": self._endpoint.model, "messages": messages, "seed": seed, **self._endpoint.body}
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode("ascii")

    async def _send(self, body: bytes) -> Answer | _Failure:
        """One try."""
        received = await self._post(body)
        if isinstance(received, _Failure):
            return received
        response, content = received
        if response.is_success:
            try:
                answer = parse_answer(content)
            except UnusableAnswer as error:
                return _Failure(f"{error}: {error_text(content, self._endpoint.api_key)}")
            self._has_answered = True
            return answer
        status = response.status_code
        said = f"{status}: {error_text(content, self._endpoint.api_key)}"
        if status in _RETRIED or status >= 500:
            return _Failure(said, self._retry_after(response.headers.get("retry-after", "")))
        if status in _MAYBE_THE_PROMPT:
            other = None if self._has_answered else await self._post(self._body(_HARMLESS, 0))
            if isinstance(other, _Failure):
                return other
            if other is None or other[0].is_success:
                logger.warning("the endpoint refuses a prompt (%s); it is played as an empty answer", said)
                return Answer("", "refused_prompt")
        raise UserError(f"{self._endpoint.url} refuses the request ({said}). {self._way_out(status)}")

    async def _post(self, body: bytes) -> tuple[httpx.Response, bytes] | _Failure:
        """Whatever the endpoint says to a request, with its body."""
        try:
            async with (
                asyncio.timeout(self._endpoint.timeout_s),
                self._http.stream("POST", self._endpoint.url, content=body) as response,
            ):
                content = await _read(response)
        except TimeoutError:
            return _Failure(f"no whole answer within {self._endpoint.timeout_s:g} s")
        except httpx.RequestError as error:
            return _Failure(f"{type(error).__name__} {error}".rstrip(" ."))
        if content is None:
            return _Failure(f"an answer of more than {_MAX_BODY:,} bytes")
        return response, content

    def _retry_after(self, header: str) -> float:
        """Seconds that the endpoint asks to wait: a number or an HTTP date; 0 where it says nothing usable.

        Raises:
            UserError: longer than a program should sit and wait.
        """
        try:
            seconds = float(header)
        except ValueError:
            try:
                seconds = parsedate_to_datetime(header).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError):
                return 0.0
        if seconds > _MAX_RETRY_AFTER_S:
            raise UserError(
                f"{self._endpoint.url} asks to come back in {seconds:.0f} s; run the same command again then."
            )
        # A NaN is not above 0 either.
        return seconds if seconds > 0 else 0.0

    def _way_out(self, status: int) -> str:
        variable = self._endpoint.key_variable
        if status in (401, 403):
            if self._endpoint.api_key:
                return f"Check the key in {variable}."
            return f"No key was sent: set {variable}, or name another variable with --api-key-env."
        if status == 404 or 300 <= status < 400:
            return f"Check --base-url (it usually ends in /v1) and --model {self._endpoint.model}."
        return "Check --model, --max-tokens and --extra-body (a null there leaves an entry out, also seed)."


async def _read(response: httpx.Response) -> bytes | None:
    """The body; None when it is larger than any honest answer."""
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > _MAX_BODY:
            return None
        parts.append(part)
    return b"".join(parts)
