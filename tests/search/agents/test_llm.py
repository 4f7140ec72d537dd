"""One question to an LLM over real HTTP through real litellm: bounded in time and tokens, every request counted, no key shown."""

from __future__ import annotations

import importlib.util
import inspect
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from search.agents.llm import Answer, Llm, LlmSpec, import_litellm
from search.agents.llm_errors import FINAL, RETRIED, outcome_of
from search.agents.scripted import Act, Call, Endless, Fail, Garbage, Say, ScriptedServer, Stall, in_turn
from search.agents.secret import OWN_KEY, Secret

if importlib.util.find_spec("litellm") is None:
    pytest.skip("the extra `agents` is not installed", allow_module_level=True)
KEY = "sk-canary-3141592653"
QUESTION = [{"role": "user", "content": "what now?"}]


@contextmanager
def asking(acts: Sequence[Act], **spec: object) -> Iterator[tuple[Llm, ScriptedServer]]:
    with ScriptedServer(in_turn(acts)) as server:
        made = LlmSpec(model="openai/scripted", api_base=server.url, reply_tokens=200, **spec)  # type: ignore[arg-type]
        llm = Llm(made, "agent:mlp", keys={OWN_KEY: Secret(KEY)}, first_wait_seconds=0.01)
        try:
            yield llm, server
        finally:
            llm.close()


def ask(acts: Sequence[Act], seconds: float = 60.0) -> tuple[Answer, ScriptedServer]:
    with asking(acts) as (llm, server):
        return llm.ask(QUESTION, time.monotonic() + seconds), server


def test_a_reply_with_its_account() -> None:
    usage = {
        "prompt_tokens": 100, "completion_tokens": 40, "total_tokens": 140,
        "prompt_tokens_details": {"cached_tokens": 60}, "completion_tokens_details": {"reasoning_tokens": 30},
    }  # fmt: skip
    answer, server = ask([Say("use fewer bytes", usage=usage)])
    assert answer.reply is not None
    assert answer.reply.text == "use fewer bytes"
    call = answer.calls[0]
    assert (call.prompt_tokens, call.cached_tokens, call.completion_tokens, call.reasoning_tokens) == (100, 60, 40, 30)
    assert (call.usd, call.estimated, call.tokens) == (None, False, 140)
    assert server.requests[0].authorization == f"Bearer {KEY}"
    assert server.requests[0].body["max_tokens"] == 200


def test_a_native_tool_call_and_a_reply_that_was_cut_off() -> None:
    with asking([Call("slots", '{"a": 1}'), Say("half a", finish_reason="length")], tools="native") as (llm, server):
        tool = {"type": "function", "function": {"name": "slots", "parameters": {"type": "object"}}}
        first = llm.ask(QUESTION, time.monotonic() + 60, tools=[tool]).reply
        second = llm.ask(QUESTION, time.monotonic() + 60).reply
    assert first is not None
    assert [(c.name, json.loads(c.arguments)) for c in first.calls] == [("slots", {"a": 1})]
    assert server.requests[0].body["tools"] == [tool]
    assert second is not None
    assert second.cut_off


def test_busy_broken_and_garbled_servers_are_asked_again_and_each_request_counts() -> None:
    acts = [Fail(429, retry_after_seconds=0.01), Fail(500), Garbage(), Say("at last")]
    answer, server = ask(acts)
    assert answer.reply is not None
    assert [call.outcome for call in answer.calls] == ["rate-limited", "server-error", "garbage", "reply"]
    assert len(server.requests) == 4


@pytest.mark.parametrize(("status", "outcome"), [(401, "no-access"), (404, "not-found"), (400, "refused")])
def test_what_another_try_cannot_mend_is_asked_once_and_shows_no_key(status: int, outcome: str) -> None:
    answer, server = ask([Fail(status, f"your key {KEY} is bad")])
    assert (answer.reply, answer.outcome, len(server.requests)) == (None, outcome, 1)
    assert "your key [key] is bad" in answer.problem


@pytest.mark.parametrize("act", [Stall(), Fail(503), Fail(429, retry_after_seconds=3600.0)])
def test_one_deadline_holds_over_all_retries(act: Act) -> None:
    started = time.monotonic()
    answer, _ = ask([act], seconds=1.0)
    assert answer.reply is None
    assert answer.outcome in ("timeout", "server-error", "rate-limited")
    assert time.monotonic() - started < 60  # of an hour, or for ever


def test_waiting_for_a_gap_between_measurements_puts_the_deadline_off() -> None:
    now = [0.0]

    @contextmanager
    def gap() -> Iterator[None]:
        now[0] += 100.0
        yield

    with ScriptedServer(in_turn([Say("late but well")])) as server:
        spec = LlmSpec(model="openai/scripted", api_base=server.url)
        llm = Llm(spec, "agent:mlp", clock=lambda: now[0])
        answer = llm.ask(QUESTION, 10.0, between=gap)
        llm.close()
    assert answer.reply is not None
    assert answer.waited_seconds == 100.0


def test_a_stream_that_never_ends_is_cut_off_and_what_came_is_counted() -> None:
    answer, _ = ask([Endless("and again ", pause_seconds=0.0)])
    assert (answer.reply, answer.outcome) == (None, "overlong")
    assert answer.calls[0].estimated
    assert answer.calls[0].completion_tokens > 200


def test_a_stop_ends_a_question_at_once() -> None:
    with asking([Stall()]) as (llm, server):
        found: list[Answer] = []
        thread = threading.Thread(target=lambda: found.append(llm.ask(QUESTION, time.monotonic() + 3600)))
        thread.start()
        while not server.requests and thread.is_alive():
            thread.join(0.01)
        llm.stop.set()
        thread.join(60)
    assert [answer.outcome for answer in found] == ["stopped"]


def test_prices_and_windows_that_litellm_knows() -> None:
    llm = Llm(LlmSpec(model="gpt-4o-mini"), "agent:mlp")
    assert (llm.context_tokens, llm.has_tools, llm.is_priced) == (128_000, True, True)
    assert llm.usd_of(1_000_000, 0) == pytest.approx(0.15)
    assert llm.usd_of(1_000_000, 0, cached_tokens=1_000_000) == pytest.approx(0.075)
    assert llm.count("one two three") == 3
    llm.close()


def test_every_error_of_litellm_has_an_outcome() -> None:
    import_litellm()
    import litellm.exceptions

    kinds = [
        kind
        for kind in vars(litellm.exceptions).values()
        if inspect.isclass(kind) and issubclass(kind, Exception) and not kind.__name__.startswith("_")
    ]
    unknown = [kind.__name__ for kind in kinds if kind.__name__ not in {**RETRIED, **FINAL}]
    assert unknown == []
    assert not set(RETRIED) & set(FINAL)
    assert outcome_of(RuntimeError("new")) == ("garbage", True)


def test_a_secret_shows_itself_to_nobody() -> None:
    import pickle

    secret = Secret(KEY)
    assert KEY not in f"{secret} {secret!r} {[secret]} {secret:>40}"
    with pytest.raises(TypeError):
        json.dumps({"key": secret})
    assert pickle.loads(pickle.dumps(secret)).reveal() == KEY
