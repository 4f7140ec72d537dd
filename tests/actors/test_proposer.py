"""The proposer as a server: when it thinks, when it waits, and why it ends. Real litellm, scripted server."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from actors.proposer import AHEAD, HOPELESS_AFTER, ProposerServer, ProposerSpec, Standing
from hotpass.canonical import Json
from search.agents.llm import LlmSpec
from search.agents.scripted import Act, Fail, Say, ScriptedServer, in_turn, tool_text
from search.agents.secret import OWN_KEY, Secret
from search.agents.spend import LlmCaps
from tests.search.agents.canned import CannedCampaign

if importlib.util.find_spec("litellm") is None:
    pytest.skip("the extra `agents` is not installed", allow_module_level=True)

KEY = "sk-canary-1618033988"
SUBMIT = Say(tool_text("submit_proposal", request_id="r", hypothesis="h", parts=[{"name": "a"}]))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `give_keys` sets is gone after the test."""
    monkeypatch.setenv(OWN_KEY, "")


def server_for(url: str, campaign: CannedCampaign, **changes: Any) -> ProposerServer:
    llm = LlmSpec(model="openai/scripted", api_base=url)
    given = {"index": 0, "llm": llm, "caps": LlmCaps(), "turn_seconds": 30.0, **changes}
    return ProposerServer(ProposerSpec(**given), campaign, {OWN_KEY: Secret(KEY)})


def ended(acts: list[Act], campaign: CannedCampaign | None = None, **changes: Any) -> tuple[Standing, ScriptedServer]:
    with ScriptedServer(in_turn(acts)) as server:
        return server_for(server.url, campaign or CannedCampaign(), **changes).run(), server


def test_a_refused_key_ends_it_with_a_sentence_that_does_not_hold_the_key() -> None:
    standing, server = ended([SUBMIT, Fail(401, f"{KEY} is not valid")])
    assert (standing.turns, standing.last.outcome) == (2, "no-access")
    assert standing.ended.startswith("no-access: ")
    assert "[key] is not valid" in standing.ended
    assert KEY not in str(standing)
    assert server.requests[0].authorization == f"Bearer {KEY}"


def test_a_money_cap_alone_is_refused_for_a_model_of_unknown_price() -> None:
    standing, server = ended([SUBMIT], caps=LlmCaps(usd=1.0))
    assert "the price of openai/scripted is unknown; give --llm-max-tokens too" in standing.ended
    assert server.requests == []


def test_its_share_spent_ends_it() -> None:
    standing, _ = ended([SUBMIT], caps=LlmCaps(tokens=9_000))
    assert standing.last.outcome == "spent"
    assert standing.ended


def test_it_ends_with_the_search() -> None:
    campaign = CannedCampaign()
    campaign.num_waiting = -1
    standing, server = ended([SUBMIT], campaign)
    assert (standing.ended, standing.turns, server.requests) == ("the search has ended", 0, [])


def test_it_thinks_no_further_ahead_than_it_may_and_stops_when_told() -> None:
    class Counting(CannedCampaign):
        def call(self, author: str, tool: str, arguments: Mapping[str, Any]) -> Json:
            self.num_waiting += tool == "submit_proposal"
            return super().call(author, tool, arguments)

        def waiting(self, author: str) -> int:
            if self.num_waiting >= AHEAD:
                full.set()
            return self.num_waiting

    full, campaign = threading.Event(), Counting()
    with ScriptedServer(in_turn([SUBMIT])) as scripted:
        server = server_for(scripted.url, campaign)
        thread = threading.Thread(target=server.run)
        thread.start()
        assert full.wait(120)
        server.stop()
        thread.join(120)
    assert (server.standing().turns, server.standing().ended) == (AHEAD, "stopped")
    assert len(scripted.requests) == AHEAD


def test_an_agent_is_hopeful_until_several_turns_went_wrong() -> None:
    assert Standing(bad_in_a_row=HOPELESS_AFTER - 1).is_hopeful
    assert not Standing(bad_in_a_row=HOPELESS_AFTER).is_hopeful
    assert not Standing(ended="spent").is_hopeful
