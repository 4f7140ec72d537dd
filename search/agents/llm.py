"""One LLM behind litellm: a question, a deadline, an answer or the reason why there is none. The only module that imports litellm.

    ask(messages, deadline) ─► request ─► stream, bounded in tokens and in time ─► Answer(reply, calls)
                                  ▲  429, 5xx, no connection: wait, again, until the deadline
                                  └──────────────────────────────────────────────

The deadline holds over all retries, whatever the server does: a stall, an endless stream or a dripping socket is cut off at it. Every
request is counted, also one that gave nothing. Nothing here raises for what an LLM or its server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from search.agents.llm_errors import outcome_of, retry_after_seconds
from search.agents.secret import OWN_KEY, Secret, hidden
from search.agents.spend import LlmCall

DEFAULT_CONTEXT_TOKENS = 8192
"""Window of a model that litellm does not know."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
"""Between retries where the server names no time; doubled each time."""
CHARS_PER_TOKEN = 12
"""More characters than this for each token that was allowed: the stream does not keep to its limit."""
POLL_SECONDS = 0.1

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmSpec:
    """Which LLM, and how it may be asked."""

    model: str
    """As litellm names it: `gpt-4o`, `anthropic/claude-…`, `openai/<name>` for a server at `api_base`."""
    api_base: str = ""
    """OpenAI-compatible server; empty for the provider's own."""
    context_tokens: int = 0
    """Window of the model; 0 for what litellm knows, else `DEFAULT_CONTEXT_TOKENS`."""
    reply_tokens: int = 6000
    """Of one reply, at most; at most half of the window."""
    tools: str = "auto"
    """`native`: the API's own tool calls; `text`: JSON in the reply, which every model can write; `auto`: native where litellm knows that
    the model has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeCall:
    """A tool call by the API's own means."""

    call_id: str
    name: str
    arguments: str
    """As the model wrote them: JSON if all is well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the model said."""

    text: str
    calls: tuple[NativeCall, ...] = ()
    cut_off: bool = False
    """It ran into its token limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of a question."""

    reply: Reply | None
    calls: tuple[LlmCall, ...]
    """One for each request, in order."""
    outcome: str
    """`reply`, or why there is none (of the last request)."""
    problem: str = ""
    """The server's words, without keys, at most 300 characters."""
    waited_seconds: float = 0.0
    """Spent before requests on what is held during them; it does not count against the deadline."""


@dataclass(slots=True)
class _Heard:
    """What a stream gave so far."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str = ""
    usage: Any = None

    @property
    def chars(self) -> int:
        return sum(map(len, self.text)) + sum(len(call["arguments"]) for call in self.calls.values())


class Llm:
    """Asks one model. Used by one thread; `stop` may be set from any."""

    def __init__(
        self,
        spec: LlmSpec,
        author: str,
        *,
        keys: Mapping[str, Secret] | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_wait_seconds: float = FIRST_WAIT_SECONDS,
    ) -> None:
        """`keys` are hidden from whatever is passed on; `OWN_KEY` among them is sent to `api_base`."""
        self.spec, self.author = spec, author
        self.stop = stop or threading.Event()
        self._keys = dict(keys or {})
        self._clock = clock
        self._first_wait_seconds = first_wait_seconds
        self._litellm = import_litellm()
        self._runner = asyncio.Runner()
        self._info = self._known()

    @property
    def context_tokens(self) -> int:
        """The window that prompts must fit in, with room for the reply."""
        return self.spec.context_tokens or int(self._info.get("max_input_tokens") or 0) or DEFAULT_CONTEXT_TOKENS

    @property
    def reply_tokens(self) -> int:
        known = int(self._info.get("max_output_tokens") or 0) or self.spec.reply_tokens
        return max(64, min(self.spec.reply_tokens, known, self.context_tokens // 2))

    @property
    def has_tools(self) -> bool:
        """Whether the API's own tool calls are used."""
        if self.spec.tools != "auto":
            return self.spec.tools == "native"
        return bool(self._info.get("supports_function_calling"))

    @property
    def is_known(self) -> bool:
        """Whether litellm has the model in its table, and so perhaps its tokenizer."""
        return bool(self._info)

    @property
    def is_priced(self) -> bool:
        return self._info.get("input_cost_per_token") is not None

    def usd_of(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float | None:
        """None when the price is unknown."""
        if not self.is_priced:
            return None
        try:
            read, written = self._litellm.cost_per_token(
                model=self.spec.model, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens,
                cache_read_input_tokens=cached_tokens,
            )  # fmt: skip
        except Exception:
            return None
        return float(read + written)

    def count(self, text: str) -> int:
        """Tokens of a text, by the model's own tokenizer where litellm has it."""
        return int(self._litellm.token_counter(model=self.spec.model, text=text)) if text else 0

    def ask(
        self,
        messages: Sequence[Message],
        deadline: float,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reply_tokens: int | None = None,
        between: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Answer:
        """Until there is a reply, another try is useless, or the clock has reached `deadline`.

        `between` is held during each request; what it waits for is not the LLM's fault, and puts the deadline off.
        """
        calls: list[LlmCall] = []
        waited = 0.0
        pause, outcome, problem = self._first_wait_seconds, "timeout", ""
        while not self.stop.is_set() and self._clock() < deadline:
            began = self._clock()
            with between():
                waited += self._clock() - began
                deadline += self._clock() - began
                reply, call, error = self._once(messages, deadline, tools, reply_tokens or self.reply_tokens)
            calls.append(call)
            outcome = call.outcome
            if reply is not None:
                return Answer(reply=reply, calls=tuple(calls), outcome=outcome, waited_seconds=waited)
            problem = hidden(str(error), self._keys.values())[:300] if error else ""
            again = outcome == "garbage" if error is None else outcome_of(error)[1]
            if not again:
                break
            asked = retry_after_seconds(error) if error else None
            wait = min(pause if asked is None else asked, deadline - self._clock())
            pause = min(2 * pause, LONGEST_WAIT_SECONDS)
            if wait > 0:
                self.stop.wait(wait)
        return Answer(reply=None, calls=tuple(calls), outcome=outcome, problem=problem, waited_seconds=waited)

    def close(self) -> None:
        self._runner.close()

    def _once(
        self, messages: Sequence[Message], deadline: float, tools: Sequence[Mapping[str, Any]], reply_tokens: int
    ) -> tuple[Reply | None, LlmCall, BaseException | None]:
        """One request: a reply or the error, and what it cost."""
        started, heard, error = self._clock(), _Heard(), None
        arguments = self._arguments(messages, tools, reply_tokens, deadline - started)
        try:
            outcome = self._runner.run(self._bounded(self._listen(arguments, heard, reply_tokens), deadline))
        except Exception as raised:
            error, outcome = raised, outcome_of(raised)[0]
        reply = self._without_keys(_reply(heard)) if outcome == "reply" else None
        if reply is None and outcome == "reply":
            outcome = "garbage"
        return reply, self._counted(messages, heard, outcome, self._clock() - started), error

    def _without_keys(self, reply: Reply | None) -> Reply | None:
        """Should a server have repeated a key in its answer: nothing that goes on from here has it."""
        if reply is None:
            return None
        calls = tuple(replace(call, arguments=hidden(call.arguments, self._keys.values())) for call in reply.calls)
        return replace(reply, text=hidden(reply.text, self._keys.values()), calls=calls)

    def _arguments(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], reply_tokens: int, seconds: float
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "model": self.spec.model, "messages": list(messages), "max_tokens": reply_tokens, "stream": True,
            "stream_options": {"include_usage": True}, "timeout": max(1.0, seconds), "num_retries": 0, "max_retries": 0,
        }  # fmt: skip
        if self.spec.api_base:
            key = self._keys.get(OWN_KEY)
            found["api_base"] = self.spec.api_base
            if key is not None:
                found["api_key"] = key.reveal()
            elif not self._keys:
                found["api_key"] = "none"  # the client insists on one; a local server ignores it
        if tools and self.has_tools:
            found["tools"] = [dict(tool) for tool in tools]
        return found

    async def _listen(self, arguments: Mapping[str, Any], heard: _Heard, reply_tokens: int) -> str:
        """Fill `heard` from the stream. Returns the outcome."""
        stream: AsyncIterator[Any] = await self._litellm.acompletion(**arguments)
        async for chunk in stream:
            _hear(heard, chunk)
            if heard.chars > CHARS_PER_TOKEN * reply_tokens:
                return "overlong"
        return "reply"

    async def _bounded(self, listening: Any, deadline: float) -> str:
        """The outcome of a coroutine, or `timeout` at the deadline, or `stopped`. What it waits for is cut off then."""
        task = asyncio.ensure_future(listening)
        try:
            while True:
                left = deadline - self._clock()
                done, _ = await asyncio.wait({task}, timeout=max(0.0, min(POLL_SECONDS, left)))
                if done:
                    return str(task.result())
                if self.stop.is_set():
                    return "stopped"
                if left <= 0:
                    return "timeout"
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    await asyncio.wait({task}, timeout=1.0)

    def _counted(self, messages: Sequence[Message], heard: _Heard, outcome: str, seconds: float) -> LlmCall:
        """By the server's own account where it gives one, else counted here: what was sent, and what came."""
        usage, estimated = heard.usage, False
        if usage is not None and usage.prompt_tokens:
            read, written = int(usage.prompt_tokens), int(usage.completion_tokens or 0)
            cached = _detail(usage, "prompt_tokens_details", "cached_tokens")
            reasoning = _detail(usage, "completion_tokens_details", "reasoning_tokens")
        elif outcome in ("no-connection", "rate-limited", "no-access", "not-found", "refused", "too-long"):
            read = written = cached = reasoning = 0  # refused before anything was computed
        else:
            texts = [str(message.get("content") or "") for message in messages]
            written_text = "".join(heard.text) + "".join(call["arguments"] for call in heard.calls.values())
            read, written, cached, reasoning, estimated = (
                self.count("\n".join(texts)),
                self.count(written_text),
                0,
                0,
                True,
            )
        return LlmCall(
            author=self.author, model=self.spec.model, outcome=outcome, seconds=round(seconds, 3), prompt_tokens=read,
            cached_tokens=cached, completion_tokens=written, reasoning_tokens=reasoning,
            usd=self.usd_of(read, written, cached), estimated=estimated,
        )  # fmt: skip

    def _known(self) -> dict[str, Any]:
        try:
            return dict(self._litellm.get_model_info(self.spec.model))
        except Exception:  # a model that litellm does not know is asked all the same
            return {}


def import_litellm() -> Any:
    """litellm, told to ask nobody at import, to send no telemetry and to print nothing. Raises InputError when it is not installed."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    try:
        import litellm
    except ImportError:
        from hotpass.errors import InputError

        raise InputError("--llm", "litellm", "is not installed", "pip install 'hotpass[agents]'") from None
    # A request that is stopped before it began leaves a coroutine of litellm's behind, which Python would tell the user of.
    warnings.filterwarnings("ignore", message="coroutine '.*async_.*' was never awaited", category=RuntimeWarning)
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    litellm.disable_hf_tokenizer_download = True
    litellm.drop_params = True
    return litellm


def _hear(heard: _Heard, chunk: Any) -> None:
    if getattr(chunk, "usage", None) is not None:
        heard.usage = chunk.usage
    for choice in chunk.choices or ():
        delta = choice.delta
        if getattr(delta, "content", None):
            heard.text.append(delta.content)
        for call in getattr(delta, "tool_calls", None) or ():
            known = heard.calls.setdefault(call.index or 0, {"id": "", "name": "", "arguments": ""})
            known["id"] = call.id or known["id"]
            known["name"] = (call.function.name or "") or known["name"]
            known["arguments"] += call.function.arguments or ""
        heard.finish_reason = choice.finish_reason or heard.finish_reason


def _reply(heard: _Heard) -> Reply | None:
    """None when the stream ended without a word and without an account of its tokens: that was no answer of an LLM."""
    if not heard.chars and not heard.calls and heard.usage is None:
        return None
    calls = [
        NativeCall(call_id=c["id"], name=c["name"], arguments=c["arguments"]) for _, c in sorted(heard.calls.items())
    ]
    return Reply(text="".join(heard.text), calls=tuple(calls), cut_off=heard.finish_reason == "length")


def _detail(usage: Any, group: str, name: str) -> int:
    details: Any = getattr(usage, group, None)
    return int(getattr(details, name, None) or 0)
