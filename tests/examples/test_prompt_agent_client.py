# SPDX-License-Identifier: Apache-2.0
"""The chat client alone: retries, back-off, time-outs, refusals, and whatever bodies an endpoint may send."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.prompt_agent.answers import MAX_CHARS, ODDITIES, Answer, UnusableAnswer, error_text, parse_answer
from examples.prompt_agent.client import ChatClient, Endpoint, Retries, backoff_generator
from tests.helpers.chat_server import ChatServer, HttpAnswer, completion, said, scripted, sequence
from verl.utils.errors import UserError

KEY = "sk-abcdefghijklmnop"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that the client would have waited between tries; it waits none of them."""
    seen: list[float] = []
    sleep = asyncio.sleep

    async def hurry(seconds: float) -> None:
        seen.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", hurry)
    yield seen


def ask(server: ChatServer, **changes: Any) -> tuple[Answer, int]:
    """One question over a client."""
    options = {"model": "m", "timeout_s": 5.0} | changes
    limit = options.pop("limit", 3)

    async def session() -> tuple[Answer, int]:
        endpoint = Endpoint(server.base_url, **options)
        async with ChatClient(endpoint, Retries(limit), 1) as client:
            return await client.complete("hello", 7, backoff_generator(0, "e", 0))

    return asyncio.run(session())


# ---- failures


def test_refused_for_now_and_then_answered(waits: list[float]) -> None:
    busy = HttpAnswer(b'{"error": {"message": "slow down"}}', 429, {"Retry-After": "17"})
    with ChatServer(sequence(busy, HttpAnswer(b"", 503), HttpAnswer(b"oops", 500), said("yes"))) as server:
        answer, retries = ask(server)
        assert (answer.text, retries, len(server.requests)) == ("yes", 3, 4)
        assert all(request == server.requests[0] for request in server.requests)
    assert waits[0] == 17.0
    # Back-off: 1, 2, 4, ... seconds times the generator's factor, which is a function of seed, episode and turn.
    factors = backoff_generator(0, "e", 0).uniform(0.5, 1.0, size=3)
    assert waits[1:] == pytest.approx([2 * factors[1], 4 * factors[2]])
    assert backoff_generator(0, "e", 1).random() != backoff_generator(0, "f", 0).random()


def test_back_off_is_bounded() -> None:
    retries = Retries(limit=100, base_s=1.0, cap_s=60.0)
    rng = np.random.default_rng(0)
    seconds = [retries.wait(attempt, 0.0, rng) for attempt in (0, 5, 20, 5000)]
    assert 0.5 <= seconds[0] < 1.0 and 16 <= seconds[1] < 32 and min(seconds[2:]) >= 30 and max(seconds) < 60


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("0", 0.5, 1), ("-3", 0.5, 1), ("nan", 0.5, 1), ("soon", 0.5, 1), ("2.5", 2.5, 2.5), ("date", 25, 30)],
)
def test_retry_after(header: str, low: float, high: float, waits: list[float]) -> None:
    text = formatdate(time.time() + 30, usegmt=True) if header == "date" else header
    with ChatServer(sequence(HttpAnswer(b"{}", 429, {"Retry-After": text}), said("yes"))) as server:
        assert ask(server)[1] == 1
    assert low <= waits[0] <= high


def test_a_wait_of_hours_is_the_users_decision() -> None:
    with ChatServer(sequence(HttpAnswer(b"{}", 429, {"Retry-After": "7200"}))) as server:
        with pytest.raises(UserError, match="7200 s; run the same command again"):
            ask(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "hung",
    [HttpAnswer(b"{}", pause=3.0), HttpAnswer(b"{}" + b" " * 100, pieces=102, pause=0.1)],
    ids=["silent", "drop by drop"],
)
def test_an_answer_that_does_not_come_is_asked_for_again(hung: HttpAnswer, waits: list[float]) -> None:
    start = time.monotonic()
    with ChatServer(sequence(hung, said("yes"))) as server:
        assert ask(server, timeout_s=0.3) == (Answer("yes", None, 100, 10, False), 1)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>bad gateway</html>", said("yes").body[:-9], b"\xff\xfe\x00", b"[]", b'{"error": {"message": "x"}}',
     b"[" * 100_000, b'{"choices": {}}', b"9" * 5000, b" " * (9 * 2**20)],
    ids=["nothing", "html", "half", "bytes", "list", "error with status 200", "deep", "no list", "digits", "endless"],
)  # fmt: skip
def test_a_body_that_is_no_completion_is_asked_for_again(body: bytes, waits: list[float]) -> None:
    with ChatServer(sequence(HttpAnswer(body), said("yes"))) as server:
        assert ask(server)[1] == 1
    with ChatServer(sequence(HttpAnswer(body))) as server, pytest.raises(UserError, match="failed 2 times"):
        ask(server, limit=1)


def test_nobody_listens(waits: list[float]) -> None:
    with ChatServer(scripted) as server:
        pass
    with pytest.raises(UserError, match=r"failed 4 times, the last time: ConnectError"):
        ask(server)
    assert len(waits) == 3


def test_the_key_is_cut_out_before_the_text_is_cut_off() -> None:
    for padding in range(280, 301):
        body = json.dumps({"error": {"message": "x" * padding + KEY}}).encode()
        assert "sk-" not in error_text(body, KEY)


# ---- odd answers


@pytest.mark.parametrize(
    ("answer", "oddity"),
    [
        (HttpAnswer(b'{"choices": []}'), "empty_choices"),
        (HttpAnswer(b'{"choices": [null]}'), "no_message"),
        (HttpAnswer(b'{"choices": [{"message": "hi"}]}'), "no_message"),
        (completion({"content": None}), "null_content"),
        (completion({"content": None, "tool_calls": [{"function": {"name": "f"}}]}), "tool_calls_only"),
        (completion({"content": "", "tool_calls": [{}]}), "tool_calls_only"),
        (completion({"content": ""}), "empty_text"),
        (completion({"content": {"a": 1}}), "not_text"),
        (completion({"content": "x" * (MAX_CHARS + 1)}), "cut_text"),
    ],
)
def test_odd_answers_are_named(answer: HttpAnswer, oddity: str) -> None:
    found = parse_answer(answer.body)
    assert found.oddity == oddity and oddity in ODDITIES
    assert len(found.text) == (MAX_CHARS if oddity == "cut_text" else 0)


def test_parts_surrogates_and_token_counts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, 3, {"type": "text", "text": "b"}]
    assert parse_answer(completion({"content": parts}).body) == Answer("ab")
    assert parse_answer(completion({"content": "a\ud800b"}).body).text == "a?b"
    assert parse_answer(completion({"content": "a"}, finish_reason="length").body).at_token_limit
    for bad in (None, -1, 1.5, True, "3", 10**12, [1]):
        usage = {"prompt_tokens": bad, "completion_tokens": 4}
        assert parse_answer(completion({"content": "a"}, usage).body) == Answer("a", None, None, 4)
    assert parse_answer(completion({"content": "a"}, [1]).body) == Answer("a")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "message", "content", "usage", "tool_calls", "text", "error", "finish_reason"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(JSON | st.lists(JSON, max_size=2).map(lambda choices: {"choices": choices}) | st.binary(max_size=40))
def test_any_body_is_an_answer_or_no_completion(data: Any) -> None:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    assert len(error_text(body)) <= 300 and error_text(body).isprintable()
    try:
        answer = parse_answer(body)
    except UnusableAnswer:
        return
    answer.text.encode("utf-8")
    assert bool(answer.text) or answer.oddity in ODDITIES


# ---- requests


def test_a_key_that_is_no_key_is_not_shown() -> None:
    for key in ("sk-\u00e9", "sk-1\nsk-2", "a b"):
        with pytest.raises(UserError, match="the key in OPENAI_API_KEY has characters") as caught:
            Endpoint("http://host/v1", "m", api_key=key)
        assert key not in str(caught.value)


def test_entries_of_a_request_can_be_added_and_taken_out() -> None:
    with ChatServer(sequence(said("yes"))) as server:
        ask(server, body={"seed": None, "max_tokens": None, "max_completion_tokens": 5})
        assert set(server.requests[0]) == {"model", "messages", "max_completion_tokens"}
    for base in ("http://h/v1", "http://h/v1/", "http://h/v1/chat/completions"):
        assert Endpoint(base, "m").url == "http://h/v1/chat/completions"
