"""One agent's turns: corrected twice at most, within window, caps and deadline, whatever its model writes. Real litellm, scripted server."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from search.agents.agent import FORGOTTEN, MAX_STEPS, Agent, Turn
from search.agents.briefs import BRIEFS
from search.agents.llm import Llm, LlmSpec
from search.agents.scripted import Act, Call, Fail, Say, ScriptedServer, in_turn, tool_text
from search.agents.spend import LlmCaps, LlmSpend
from tests.search.agents.canned import CannedCampaign

if importlib.util.find_spec("litellm") is None:
    pytest.skip("the extra `agents` is not installed", allow_module_level=True)

SUBMIT = tool_text("submit_proposal", request_id="r", hypothesis="h", parts=[{"name": "a"}])


@contextmanager
def agent_with(
    acts: Sequence[Act], campaign: CannedCampaign, *, caps: LlmCaps | None = None, seconds: float = 60.0, **spec: Any
) -> Iterator[tuple[Agent, ScriptedServer]]:
    with ScriptedServer(in_turn(acts)) as server:
        given = {"model": "openai/scripted", "api_base": server.url, **spec}
        llm = Llm(LlmSpec(**given), "agent:mlp", first_wait_seconds=0.01)
        try:
            yield (
                Agent(BRIEFS[0], llm, campaign, caps=caps or LlmCaps(), spent=LlmSpend(), turn_seconds=seconds),
                server,
            )
        finally:
            llm.close()


def turn(acts: Sequence[Act], campaign: CannedCampaign | None = None, **options: Any) -> tuple[Turn, ScriptedServer]:
    with agent_with(acts, campaign or CannedCampaign(), **options) as (agent, server):
        return agent.turn(), server


def last_message(server: ScriptedServer, index: int = -1) -> str:
    return str(server.requests[index].body["messages"][-1]["content"])


def test_a_turn_ends_with_the_proposal_and_what_was_wrong_before_is_told_precisely() -> None:
    campaign = CannedCampaign()
    acts = [Say("Hm."), Say(tool_text("slot_source", slot="model.layers.*.mpl")), Say(SUBMIT)]
    ended, server = turn(acts, campaign)
    assert ended.outcome == "proposed"
    assert "calls no tool" in last_message(server, 1)
    assert "did you mean 'model.layers.*.mlp'" in last_message(server, 2)
    tool, arguments = campaign.asked[-1]
    assert tool == "submit_proposal"
    assert arguments["request_id"] != "r"  # models repeat their ids
    assert [call.outcome for call in campaign.told] == ["reply"] * 3


def test_what_was_said_and_answered_is_kept_once_and_in_order() -> None:
    campaign = CannedCampaign()
    ended, server = turn([Say("Hm."), Say(tool_text("slots")), Say(SUBMIT)], campaign)
    assert ended.outcome == "proposed"
    first, second, third = campaign.exchanges
    assert [call.exchange for call in campaign.told] == [first.sha256, second.sha256, third.sha256]
    assert [first.before, second.before, third.before] == ["", first.sha256, second.sha256]
    assert [message["role"] for message in first.said] == ["system", "user"]
    asked = [message for exchange in campaign.exchanges for message in exchange.said]
    answers = [server.requests[index].body["messages"][-2] for index in (1, 2)]
    assert [*asked[:2], answers[0], asked[2], answers[1], asked[3]] == server.requests[2].body["messages"]
    assert third.reply.text == SUBMIT


def test_after_two_corrections_a_turn_is_given_up() -> None:
    ended, server = turn([Say("I cannot do that.")])
    assert (ended.outcome, len(server.requests)) == ("unusable", 3)


def test_a_refused_submission_is_a_correction_and_a_known_one_shows_its_result() -> None:
    refused = CannedCampaign({"standing": "refused", "reason": "wider than the policy"})
    ended, server = turn([Say(SUBMIT)], refused)
    assert ended.outcome == "unusable"
    assert "wider than the policy" in last_message(server)
    known = CannedCampaign({"standing": "known", "candidate": "c" * 64, "result": {"verdict": "slower"}})
    ended, server = turn([Say(SUBMIT)], known)
    assert (ended.outcome, len(server.requests)) == ("no-proposal", MAX_STEPS + 2)
    assert "slower" in last_message(server)


def test_native_calls_are_answered_as_such() -> None:
    acts = [Call("slots", "{}"), Call("post", '{"kind"'), Call("submit_proposal", json.dumps({"hypothesis": "h"}))]
    ended, server = turn(acts, tools="native")
    assert ended.outcome == "proposed"
    third = server.requests[2].body["messages"]
    assert [message["role"] for message in third[2:]] == ["assistant", "tool", "assistant", "tool"]
    assert third[3]["tool_call_id"] == third[2]["tool_calls"][0]["id"] == "call_1"
    assert "no valid JSON" in third[5]["content"]
    assert {tool["function"]["name"] for tool in server.requests[0].body["tools"]} >= {"slots", "submit_proposal"}


def test_a_token_cap_is_never_broken() -> None:
    campaign = CannedCampaign()
    with agent_with([Say("x " * 300)], campaign, caps=LlmCaps(tokens=12_000)) as (agent, server):
        outcomes = [agent.turn().outcome for _ in range(4)]
    assert outcomes[-1] == "spent"
    assert 0 < sum(call.tokens for call in campaign.told) <= 12_000
    assert len(server.requests) == len(campaign.told)


def test_a_conversation_keeps_to_the_window_by_leaving_out_whole_answers() -> None:
    read = Say(tool_text("catalogue", part="a"))
    ended, server = turn([read, read, read, read, read, Say(SUBMIT)], context_tokens=8192)
    assert ended.outcome == "proposed"
    last = server.requests[-1].body["messages"]
    assert any(FORGOTTEN in str(message["content"]) for message in last)
    assert "x = 1" in last_message(server)
    assert all(message["content"] == FORGOTTEN or len(str(message["content"])) > 20 for message in last)


def test_a_window_that_is_smaller_than_was_thought_is_found_out() -> None:
    too_long = Fail(400, "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens.")
    ended, server = turn([too_long, Say(SUBMIT)], context_tokens=32_000)
    assert (ended.outcome, len(server.requests)) == ("proposed", 2)


def test_a_window_that_cannot_hold_the_rules_is_said_so() -> None:
    ended, server = turn([Say(SUBMIT)], context_tokens=2048)
    assert (ended.outcome, server.requests) == ("too-long", [])
    assert "window of 2048 tokens" in ended.detail


def test_dead_servers_and_dead_campaigns_end_a_turn_with_their_names() -> None:
    started = time.monotonic()
    ended, _ = turn([Fail(503)], seconds=0.5)
    assert ended.outcome == "deadline"
    assert time.monotonic() - started < 60
    dead = CannedCampaign()
    dead.is_dead = True
    ended, server = turn([Say(SUBMIT)], dead)
    assert (ended.outcome, server.requests) == ("campaign", [])
