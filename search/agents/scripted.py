"""A scripted OpenAI-compatible server over real HTTP: the double of an LLM, for tests and for trying agents without one.

    with ScriptedServer(in_turn([Say('{"tool": "slots", "arguments": {}}'), Fail(429, retry_after_seconds=1), Stall()])) as server:
        … --llm openai/scripted --llm-api-base {server.url}

It says what its script says, well or badly; it knows nothing, so it shows that the plumbing works and says nothing about the worth of
agents. It binds to 127.0.0.1 and answers `/v1/chat/completions`, streamed or not.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

CHUNK_CHARS = 200
"""Of a streamed reply's pieces."""


@dataclass(frozen=True, slots=True)
class Say:
    """A reply, perhaps late."""

    text: str
    finish_reason: str = "stop"
    """`length` for a reply that was cut off by the token limit."""
    delay_seconds: float = 0.0
    usage: Mapping[str, Any] | None = None
    """As the API reports it; None reports four characters a token, `{}` reports none."""


@dataclass(frozen=True, slots=True)
class Call:
    """A native tool call; arguments as the very text that is sent, so that it may be broken."""

    tool: str
    arguments: str
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Fail:
    """An HTTP error."""

    status: int
    message: str = "scripted failure"
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """Accepts the request, and never answers."""


@dataclass(frozen=True, slots=True)
class Endless:
    """Streams, and never ends."""

    text: str = "and "
    pause_seconds: float = 0.01


@dataclass(frozen=True, slots=True)
class Garbage:
    """Answers 200 with what is no JSON."""

    text: str = "<html>bad gateway</html>"


Act = Say | Call | Fail | Stall | Endless | Garbage
Script = Callable[[Mapping[str, Any]], Act]
"""The request's body → what the server does."""


def in_turn(acts: Sequence[Act]) -> Script:
    """Each once, in order; the last again and again."""
    waiting, lock = list(acts), threading.Lock()

    def script(body: Mapping[str, Any]) -> Act:
        with lock:
            return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return script


def tool_text(tool: str, **arguments: Any) -> str:
    """A tool call as an agent without native tools writes it."""
    return json.dumps({"tool": tool, "arguments": arguments})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the server got."""

    body: Mapping[str, Any]
    authorization: str
    """The header as it came."""


class ScriptedServer:
    """Serves from `__enter__` to `__exit__`, in threads of this process."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        """Everything asked so far, in order."""
        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """For `--llm-api-base`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(owner: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            owner.requests.append(Request(body=body, authorization=self.headers.get("Authorization", "")))
            act = owner.script(body)
            try:
                self._act(act, body)
            except (BrokenPipeError, ConnectionResetError):
                return  # whoever asked has gone

        def do_GET(self) -> None:
            self._send(200, json.dumps({"object": "list", "data": [{"id": "scripted", "object": "model"}]}))

        def _act(self, act: Act, body: Mapping[str, Any]) -> None:
            if isinstance(act, Fail):
                headers = {} if act.retry_after_seconds is None else {"Retry-After": f"{act.retry_after_seconds:g}"}
                self._send(act.status, json.dumps({"error": {"message": act.message, "type": "scripted"}}), headers)
            elif isinstance(act, Garbage):
                self._send(200, act.text)
            elif isinstance(act, Stall):
                owner.closing.wait()
                self.close_connection = True
            elif isinstance(act, Endless):
                self._stream(_endless(act, owner.closing))
            else:
                owner.closing.wait(act.delay_seconds)
                whole = _completion(act, body)
                if body.get("stream"):
                    self._stream(_chunks(whole))
                else:
                    self._send(200, json.dumps(whole))

        def _send(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
            data = text.encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, chunks: Iterator[Mapping[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for chunk in chunks:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: what was asked is in `requests`."""

    return Handler


def _completion(act: Say | Call, body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole answer as the API has it."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if isinstance(act, Say):
        message["content"], reason, written = act.text, act.finish_reason, act.text
        given = act.usage
    else:
        function = {"name": act.tool, "arguments": act.arguments}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        reason, written, given = "tool_calls", act.arguments, None
    read = len(json.dumps(body.get("messages", []))) // 4
    usage: Mapping[str, Any] | None = given
    if given is None:
        usage = {
            "prompt_tokens": read,
            "completion_tokens": len(written) // 4,
            "total_tokens": read + len(written) // 4,
        }
    return {
        "id": "scripted", "object": "chat.completion", "created": 0, "model": body.get("model", ""),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        **({"usage": dict(usage)} if usage else {}),
    }  # fmt: skip


def _chunks(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The answer in pieces, usage last."""
    head = {"id": "scripted", "object": "chat.completion.chunk", "created": 0, "model": whole["model"]}
    choice = whole["choices"][0]
    text = choice["message"]["content"] or ""
    for start in range(0, len(text), CHUNK_CHARS):
        yield {**head, "choices": [_delta({"role": "assistant", "content": text[start : start + CHUNK_CHARS]})]}
    for call in choice["message"].get("tool_calls", ()):
        yield {**head, "choices": [_delta({"role": "assistant", "tool_calls": [{"index": 0, **call}]})]}
    yield {**head, "choices": [_delta({}, choice["finish_reason"])]}
    if "usage" in whole:
        yield {**head, "choices": [], "usage": whole["usage"]}


def _endless(act: Endless, closing: threading.Event) -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        if closing.wait(act.pause_seconds):
            return
        yield {
            "id": "scripted", "object": "chat.completion.chunk", "created": 0, "model": "scripted",
            "choices": [_delta({"role": "assistant", "content": f"{act.text}{number} "})],
        }  # fmt: skip


def _delta(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason}
