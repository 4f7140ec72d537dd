"""From the inbox into the ledger: recorded before the files go, each thing once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clock import SimulatedClock
from cluster.events import EventLog, read_events
from cluster.intake import Intake
from cluster.journal import FOLDER, Journal, read_state
from cluster.ports import Silent
from cluster.state import CampaignState
from cluster.store import load_candidates, save_candidate
from hotpass.records.candidate import Candidate, PartUse, Proposal
from search.agents.spend import LlmCall
from search.board import make_post
from search.inbox import Inbox
from tests.cluster.campaigns import part


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with EventLog.open(tmp_path / FOLDER) as log:
        yield Journal(log, CampaignState(), SimulatedClock(0.0), Silent())


def proposal(name: str) -> Proposal:
    return Proposal(candidate=Candidate(parts=(PartUse(source=part(name, "mlp")),)), proposer="?", hypothesis="less")


def test_proposals_posts_and_calls_become_events_once(tmp_path: Path, journal: Journal) -> None:
    inbox = Inbox(tmp_path)
    inbox.submit(proposal("one"), "agent:mlp", "r1")
    inbox.submit(proposal("two"), "mcp:codex", "r1")
    inbox.tell(make_post("agent:mlp", "finding", "norms are cheap"))
    inbox.tell(
        LlmCall(author="agent:mlp", model="m", outcome="reply", seconds=2.0, prompt_tokens=90, completion_tokens=10)
    )
    inbox.tell(LlmCall(author="agent:mlp", model="m", outcome="timeout", seconds=9.0, prompt_tokens=90, usd=0.5))
    intake = Intake(Inbox(tmp_path), journal, lambda candidate: save_candidate(tmp_path, candidate))
    assert [p.proposer for p in intake.take(1)] == ["agent:mlp"]
    assert [p.candidate.label for p in intake.take()] == ["two"]
    assert intake.take() == []
    state = read_state(tmp_path)
    assert [(row.post.author, row.post.text) for row in state.posts] == [("agent:mlp", "norms are cheap")]
    spend = state.llm_spend["agent:mlp"]
    assert (spend.tokens, spend.unpriced_tokens, spend.usd, spend.replies) == (190, 100, 0.5, 1)
    assert state.llm_outcomes == {"reply": 1, "timeout": 1}
    assert set(load_candidates(tmp_path)) == set(state.candidates)
    assert [i.proposer for i in state.candidates.values()] == ["agent:mlp", "mcp:codex"]


def test_a_crash_between_recording_and_deleting_counts_nothing_twice(tmp_path: Path, journal: Journal) -> None:
    inbox = Inbox(tmp_path)
    inbox.submit(proposal("one"), "agent:mlp", "r1")
    inbox.tell(make_post("agent:mlp", "finding", "norms are cheap"))
    kept = {path: path.read_bytes() for path in (tmp_path / "inbox").glob("*.json")}
    assert len(Intake(Inbox(tmp_path), journal, lambda c: save_candidate(tmp_path, c)).take()) == 1
    for path, content in kept.items():
        path.write_bytes(content)
    assert Intake(Inbox(tmp_path), journal, lambda c: save_candidate(tmp_path, c)).take() == []
    assert list((tmp_path / "inbox").glob("*.json")) == []
    assert [event.kind for event in read_events(tmp_path / FOLDER)] == ["post", "proposal"]
