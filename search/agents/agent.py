"""One agent: a brief, an LLM and the campaign's tools. A turn is a conversation that ends in a proposal, or says why it does not.

    turn: digest ─► ask ─► reply ─► tool ─► answer ─► ask ─► … ─► submit_proposal ─► Turn(outcome)

One deadline holds over the whole turn with all its requests and retries. A reply that cannot be used is answered with one precise
sentence, twice at most. Whatever an LLM, its server or a tool does ends as an outcome; nothing is raised.

What is not here: when a turn begins and how often (`actors.proposer`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hotpass.canonical import Json
from hotpass.errors import HotpassError, InputError
from search.agents.briefs import Brief
from search.agents.exchange import Exchange
from search.agents.llm import Answer, Llm, Message, Reply
from search.agents.prompts import SHARE, Section, digest, system_prompt, tool_specs
from search.agents.replies import ToolUse, Unusable, tool_use
from search.agents.spend import LlmCall, LlmCaps, LlmSpend, reason_to_stop_asking

MAX_STEPS = 12
"""Tool calls of one turn."""
MAX_CORRECTIONS = 2
"""Replies of one turn that may be unusable and are answered with what is wrong."""
MIN_DIGEST_TOKENS = 400
"""With less room than this for what the campaign knows, an agent would only guess."""
UNKNOWN_TOKENIZER = 1.3
"""A model that litellm does not know may need so many times the tokens that are counted with another's tokenizer; corrected upward by
what the server says."""
MIN_REPLY_TOKENS = 64
"""With less room than this for a reply, nothing is asked."""


class Link(Protocol):
    """What an agent has of its campaign, near or far."""

    def call(self, author: str, tool: str, arguments: Mapping[str, Any]) -> Json:
        """Raises InputError for a bad call, MachineError when the campaign does not answer."""
        ...

    def tell(self, call: LlmCall, exchange: Exchange | None = None) -> None:
        """For the ledger; what was said and answered is kept beside it, where there was a reply."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What came of a turn."""

    outcome: str
    """`proposed`, `known`, `unusable`, `no-proposal`, `deadline`, `spent`, `stopped`, `campaign`, or the LLM's outcome."""
    detail: str = ""
    """One sentence; never a key."""

    @property
    def is_good(self) -> bool:
        return self.outcome in ("proposed", "known", "no-proposal")


class Agent:
    """Keeps what it spent, and what came of its proposals through the campaign's ledger. Used by one thread."""

    def __init__(
        self,
        brief: Brief,
        llm: Llm,
        link: Link,
        *,
        caps: LlmCaps,
        spent: LlmSpend,
        turn_seconds: float,
        between: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`caps`: this agent's own share; `spent`: of it, by earlier sessions. `between` is held during each request to the LLM."""
        self.brief, self.llm, self.link = brief, llm, link
        self.author = f"agent:{brief.name}"
        self.caps, self.spend = caps, spent
        self.turn_seconds = turn_seconds
        self._between = between
        self._clock = clock
        self._turns = 0
        self._said, self._exchange = 0, ""
        """Messages of this conversation that are kept already, and the exchange that they are kept in."""
        self._window = llm.context_tokens
        self._ratio = 1.0 if llm.is_known else UNKNOWN_TOKENIZER
        """Tokens by the server's account over tokens counted here: the most so far."""
        self._tools = tool_specs() if llm.has_tools else []
        self._tool_tokens = llm.count(json.dumps(self._tools)) if self._tools else 0

    def turn(self) -> Turn:
        """One conversation. Never raises for what LLM, server or tools do."""
        self._turns += 1
        self._said, self._exchange = 0, ""
        deadline = self._clock() + self.turn_seconds
        try:
            messages = self._opening()
        except InputError as error:
            return Turn(outcome="too-long" if error.field == "--llm" else "campaign", detail=str(error))
        except HotpassError as error:
            return Turn(outcome="campaign", detail=str(error))
        corrections = 0
        for step in range(MAX_STEPS + MAX_CORRECTIONS):
            answer = self._ask(messages, deadline)
            if isinstance(answer, Turn):
                return answer
            assert answer.reply is not None
            deadline += answer.waited_seconds
            use = tool_use(answer.reply)
            messages.append(_said(answer.reply, use))
            result: Json
            if isinstance(use, Unusable):
                result, failed = use.problem, True
            else:
                ended, result, failed = self._call(use, step)
                if ended is not None:
                    return ended
            if failed:
                corrections += 1
                if corrections > MAX_CORRECTIONS:
                    return Turn(outcome="unusable", detail=str(result)[:300])
            messages.append(_answered(use, result, failed))
        return Turn(outcome="no-proposal", detail=f"{MAX_STEPS} tool calls without a proposal")

    def _ask(self, messages: list[Message], deadline: float) -> Answer | Turn:
        """One reply, within the window, the caps and the deadline; or the end of the turn."""
        for _ in range(3):
            _forget_oldest(messages, self.llm.count, self._window - self._reply_room() - self._tool_tokens)
            room = self._affordable(messages)
            reason = reason_to_stop_asking(self.caps, self.spend)
            if reason or room < MIN_REPLY_TOKENS:
                return Turn(outcome="spent", detail=reason or "what is left would not pay for a reply")
            answer = self.llm.ask(messages, deadline, tools=self._tools, reply_tokens=room, between=self._between)
            counted = self.llm.count(_text(messages)) + self._tool_tokens
            for call in answer.calls:
                if not call.estimated and counted:
                    self._ratio = max(self._ratio, call.prompt_tokens / counted)
                self.spend = self.spend.plus(call)
                self._tell(call, messages, answer.reply if call is answer.calls[-1] else None)
            deadline += 0.0 if answer.reply is not None else answer.waited_seconds
            if answer.reply is not None:
                return answer
            if answer.outcome != "too-long" and "context" not in answer.problem.lower():
                break
            self._window = max(1024, self._window // 2)  # the model's window is smaller than was thought
        if answer.outcome in ("stopped", "too-long"):
            return Turn(outcome=answer.outcome, detail=answer.problem)
        outcome = "deadline" if self._clock() >= deadline else answer.outcome
        return Turn(outcome=outcome, detail=answer.problem)

    def _tell(self, call: LlmCall, messages: list[Message], reply: Reply | None) -> None:
        if reply is None:
            self.link.tell(call)
            return
        said = tuple(messages[self._said :])
        exchange = Exchange(author=self.author, model=call.model, before=self._exchange, said=said, reply=reply)
        self._said, self._exchange = len(messages) + 1, exchange.sha256  # the reply itself is the next message
        self.link.tell(replace(call, exchange=exchange.sha256), exchange)

    def _reply_room(self) -> int:
        return min(self.llm.reply_tokens, self._window // 2)

    def _affordable(self, messages: list[Message]) -> int:
        """Tokens that the next reply may have without breaking a cap."""
        prompt = int(self._ratio * (self.llm.count(_text(messages)) + self._tool_tokens))
        room = self._reply_room()
        if self.caps.tokens:
            room = min(room, self.caps.tokens - self.spend.tokens - prompt)
        if self.caps.usd:
            read, both = self.llm.usd_of(prompt, 0), self.llm.usd_of(prompt, 1000)
            if read is not None and both is not None and both > read:
                room = min(room, int((self.caps.usd - self.spend.usd - read) / (both - read) * 1000))
        return room

    def _call(self, use: ToolUse, step: int) -> tuple[Turn | None, Json, bool]:
        """(the end of the turn or None, the answer or what is wrong, whether it is wrong)."""
        arguments = dict(use.arguments)
        if use.tool == "submit_proposal":
            arguments["request_id"] = (
                f"{int(time.time())}-{self._turns}-{step}"  # the agent's own numbering may repeat itself
            )
        try:
            result = self.link.call(self.author, use.tool, arguments)
        except InputError as error:
            return None, str(error), True
        except HotpassError as error:
            return Turn(outcome="campaign", detail=str(error)), None, True
        if use.tool == "submit_proposal":
            standing = result["standing"]
            if standing == "queued":
                return Turn(outcome="proposed", detail=str(result["what"])[:200]), result, False
            if standing == "refused":
                return None, f"refused: {result.get('reason', '')}", True
        return None, result, False

    def _opening(self) -> list[Message]:
        """System prompt and digest, within `SHARE` of the window. Raises HotpassError when the campaign does not answer."""
        native = self.llm.has_tools
        system = system_prompt(self.brief, self._read("deployment"), native=native)
        fixed = self.llm.count(system) + self._tool_tokens
        room = int(SHARE * self._window) - fixed
        if room < MIN_DIGEST_TOKENS:
            raise InputError(
                "--llm",
                self.llm.spec.model,
                f"has a window of {self._window} tokens, and the rules alone take {fixed}",
                "use a model with a larger one, or correct --llm-context",
            )
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": digest(self._sections(), room, self.llm.count)},
        ]

    def _sections(self) -> list[Section]:
        """What the campaign knows, the most important section first."""
        failed = [
            line
            for verdict in ("incorrect", "failed", "invalid")
            for line in self._read("candidates", order="latest", verdict=verdict, limit=8)["candidates"]
        ]
        own = self._read("candidates", order="latest", proposer=self.author, limit=10)["candidates"]
        best = self._read("candidates", order="best", limit=12)["candidates"]
        profile = self._read("profile")
        return [
            Section(title="Where the time goes", lines=[*profile["rows"], *profile["as_loaded"]], tool="profile"),
            Section(title="What failed before, and why", lines=failed, tool="candidates"),
            Section(title="Your own proposals", lines=own, tool="candidates"),
            Section(title="Best so far", lines=best, tool="candidates"),
            Section(title="Message board", lines=self._read("read_board", limit=15)["posts"], tool="read_board"),
            Section(title="Slots", lines=self._read("slots")["slots"], tool="slots"),
            Section(title="Parts that exist", lines=self._read("catalogue")["parts"], tool="catalogue"),
            Section(title="Shapes of the traffic", lines=self._read("shapes")["rows"], tool="shapes"),
        ]

    def _read(self, tool: str, **arguments: Any) -> Any:
        return self.link.call(self.author, tool, arguments)


def _said(reply: Reply, use: ToolUse | Unusable) -> Message:
    """The reply as the conversation keeps it: a native call with its id, else the text."""
    if use.call_id:
        call = reply.calls[0]
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "role": "assistant", "content": reply.text or None,
            "tool_calls": [{"id": use.call_id, "type": "function", "function": function}],
        }  # fmt: skip
    return {"role": "assistant", "content": reply.text or "(nothing)"}


def _answered(use: ToolUse | Unusable, result: Json, failed: bool) -> Message:
    """What the tool said, as data; what is wrong, in one sentence."""
    text = f"error: {result}" if failed else json.dumps(result, ensure_ascii=False)
    if use.call_id:
        return {"role": "tool", "tool_call_id": use.call_id, "content": text}
    named = f"Answer of {use.tool}" if isinstance(use, ToolUse) else "Your last reply"
    return {"role": "user", "content": f"{named}: {text}"}


FORGOTTEN = "(no longer shown; call the tool again if you need it)"


def _forget_oldest(messages: list[Message], count: Callable[[str], int], room: int) -> None:
    """Take back the oldest answers of tools, whole, until the conversation fits; system prompt, digest and the last answer stay."""
    for message in messages[2:-1]:
        if count(_text(messages)) <= room:
            return
        if message["role"] in ("user", "tool") and message["content"] != FORGOTTEN:
            message["content"] = FORGOTTEN


def _text(messages: list[Message]) -> str:
    return "\n".join(
        f"{m.get('content') or ''}{json.dumps(m['tool_calls']) if 'tool_calls' in m else ''}" for m in messages
    )
