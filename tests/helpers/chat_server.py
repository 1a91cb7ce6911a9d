# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible chat endpoint on this machine whose "model" is a function."""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

__all__ = ["ChatServer", "HttpAnswer", "Model", "completion", "follows_plans", "said", "scripted", "sequence", "tagged"]


@dataclass(frozen=True)
class HttpAnswer:
    """What the server sends back."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: int = 1
    """The body comes in so many pieces with `pause` seconds before each."""
    pause: float = 0.0


Model = Callable[[dict[str, Any]], HttpAnswer]
"""Body of a request -> answer; called from many threads."""


def completion(message: Mapping[str, Any], usage: Any = None, **choice: Any) -> HttpAnswer:
    """A chat completion with one choice."""
    data: dict[str, Any] = {"choices": [{"index": 0, "message": {"role": "assistant", **message}, **choice}]}
    if usage is not None:
        data["usage"] = usage
    return HttpAnswer(json.dumps(data).encode())


def said(text: str, prompt_tokens: int = 100, completion_tokens: int = 10) -> HttpAnswer:
    """An ordinary answer."""
    return completion({"content": text}, {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


def tagged(action: str) -> str:
    """An answer in the form that the prompts ask for."""
    return f"<think>so</think><action>{action}</action>"


def prompt_of(request: Mapping[str, Any]) -> str:
    """The only message."""
    (message,) = request["messages"]
    assert message["role"] == "user"
    return str(message["content"])


def scripted(request: dict[str, Any]) -> HttpAnswer:
    """One of the actions in the prompt, by its text and the request's seed: the same answer to the same request."""
    prompt = prompt_of(request)
    offered = re.findall(r"'([^']+)'", prompt.rpartition("Actions you can take now:")[2])
    number = zlib.crc32(f"{prompt}/{request['seed']}".encode())
    return said(tagged(offered[number % len(offered)]), prompt_tokens=len(prompt.split()), completion_tokens=7)


def follows_plans(plans: Mapping[str, Sequence[str]]) -> Model:
    """A model that knows the task texts: action number k of the task's plan in step k, at its end the last one."""

    def answer(request: dict[str, Any]) -> HttpAnswer:
        prompt = prompt_of(request)
        plan = next(plan for task, plan in plans.items() if task in prompt)
        taken = re.search(r"You have taken (\d+) step", prompt)
        return said(tagged(plan[min(int(taken[1]), len(plan) - 1) if taken else 0]))

    return answer


def sequence(*answers: HttpAnswer) -> Model:
    """These answers one after the other, the last one again and again."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


class ChatServer:
    """`with ChatServer(model) as server:`; `server.base_url` is its address. Knows what it was asked."""

    def __init__(self, model: Model) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        """`Authorization` headers."""
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append(request)
                    outer.keys.append(self.headers.get("Authorization"))
                    outer._at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer._at_once)
                try:
                    if self.path == "/v1/chat/completions":
                        self._send(model(request))
                    else:
                        self._send(HttpAnswer(b'{"error": {"message": "no such path"}}', 404))
                except (BrokenPipeError, ConnectionResetError):
                    # The client has given up waiting.
                    self.close_connection = True
                finally:
                    with outer._lock:
                        outer._at_once -= 1

            def _send(self, answer: HttpAnswer) -> None:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                size = -(-len(answer.body) // answer.pieces)
                for start in range(0, len(answer.body), max(size, 1)):
                    time.sleep(answer.pause)
                    self.wfile.write(answer.body[start : start + size])
                    self.wfile.flush()

            def log_message(self, *_: Any) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
