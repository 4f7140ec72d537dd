"""The inbox: handed in once, found in order, refused with a reason, nothing lost between file and ledger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, PartUse, Proposal
from hotpass.records.measurement import Attempt
from search.agents.spend import LlmCall
from search.board import MAX_CHARS, Post, PostKind, make_post
from search.inbox import MAX_WAITING, Inbox, Standing
from tests.search.builders import attempt, part


def proposal(name: str) -> Proposal:
    made = Candidate(parts=(PartUse(source=part(name, ["model.layers.*.mlp"])),))
    return Proposal(candidate=made, proposer="?", parents=(AS_LOADED.id,), hypothesis="fewer bytes")


class KnownResults:
    """A ledger by hand."""

    def __init__(self, attempts: Sequence[Attempt] = (), proposed: Sequence[str] = ()) -> None:
        self.attempts, self.proposed = list(attempts), set(proposed)

    def is_proposed(self, candidate_id: str) -> bool:
        return candidate_id in self.proposed

    def attempts_of(self, candidate_id: str) -> Sequence[Attempt]:
        return [a for a in self.attempts if a.candidate_id == candidate_id]


def test_what_is_handed_in_is_offered_once_in_order_with_its_author(tmp_path: Path) -> None:
    agents, loop = Inbox(tmp_path), Inbox(tmp_path)
    for index, name in enumerate(("one", "two", "three")):
        assert agents.submit(proposal(name), "agent:mlp", f"r{index}").standing is Standing.QUEUED
    first = loop.offers(2)
    assert [p.candidate.label for p in first] == ["one", "two"]
    assert first[0].proposer == "agent:mlp"
    assert first[0].candidate == proposal("one").candidate
    assert [p.candidate.label for p in loop.offers()] == ["three"]
    assert loop.offers() == []


def test_what_the_loop_did_not_record_before_it_died_is_offered_again(tmp_path: Path) -> None:
    Inbox(tmp_path).submit(proposal("one"), "agent:mlp", "r1")
    assert len(Inbox(tmp_path).offers()) == 1
    again = Inbox(tmp_path)
    offered = again.offers()
    assert len(offered) == 1
    again.taken(offered)
    assert Inbox(tmp_path).offers() == []
    assert list((tmp_path / "inbox").glob("*.json")) == []


def test_a_request_id_counts_once_and_a_known_candidate_is_not_queued_twice(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path, ledger=KnownResults(proposed=[proposal("old").candidate.id]))
    first = inbox.submit(proposal("one"), "agent:mlp", "r1")
    assert inbox.submit(proposal("one"), "agent:mlp", "r1") == first
    assert inbox.submit(proposal("two"), "agent:mlp", "r1").standing is Standing.REFUSED
    assert inbox.submit(proposal("one"), "mcp:codex", "r1").standing is Standing.KNOWN
    assert inbox.submit(proposal("old"), "agent:mlp", "r2").standing is Standing.KNOWN
    assert len(Inbox(tmp_path).offers()) == 1


def test_refusals_say_why(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path, admits=lambda c: "claims no slot of this engine" if c.label == "bad" else "")
    assert inbox.submit(proposal("bad"), "agent:mlp", "r0").reason == "claims no slot of this engine"
    for index in range(MAX_WAITING):
        inbox.submit(proposal(f"p{index}"), "agent:mlp", f"r{index + 1}")
    flooded = inbox.submit(proposal("more"), "agent:mlp", "r99")
    assert flooded.standing is Standing.REFUSED
    assert "16 proposals of yours wait" in flooded.reason
    assert inbox.submit(proposal("more"), "agent:attention", "r99").standing is Standing.QUEUED


def test_a_result_is_the_latest_attempt_of_the_ledger(tmp_path: Path) -> None:
    ledger = KnownResults()
    inbox = Inbox(tmp_path, ledger=ledger)
    ticket = inbox.submit(proposal("one"), "agent:mlp", "r1")
    assert inbox.result(ticket) is Standing.QUEUED
    ledger.proposed.add(ticket.candidate_id)
    assert inbox.result(ticket) is Standing.PROPOSED
    ledger.attempts += [
        attempt(ticket.candidate_id, AS_LOADED.id, 1.4),
        attempt(ticket.candidate_id, AS_LOADED.id, 1.5),
    ]
    found = inbox.result(ticket)
    assert isinstance(found, Attempt)
    assert found.speedup is not None
    assert found.speedup.value == 1.5


def test_posts_and_calls_travel_with_an_id_that_a_restart_keeps(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.tell(make_post("agent:mlp", "warning", "bf16 is too wide here", candidates=["c" * 64], evidence=[17]))
    inbox.tell(LlmCall(author="agent:mlp", model="m", outcome="reply", seconds=1.5, prompt_tokens=10, usd=None))
    before = Inbox(tmp_path).notes()
    assert [note.kind for note in before] == ["post", "reply"]
    post = before[0].content
    assert isinstance(post, Post)
    assert (post.kind, post.evidence) == (PostKind.WARNING, (17,))
    assert inbox.notes() == before
    assert inbox.notes() == []
    inbox.taken(before)
    assert Inbox(tmp_path).notes() == []


def test_files_that_nobody_handed_in_are_put_aside(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.submit(proposal("one"), "agent:mlp", "r1")
    folder = tmp_path / "inbox"
    (folder / "1-proposal-torn.json").write_text('{"kind": "propo')
    item = json.loads(next(folder.glob("*-proposal-*[!n].json")).read_text())
    item["content"]["candidate"]["parts"][0]["source"]["files"][0][1] += "# changed afterwards"
    (folder / "2-proposal-forged.json").write_text(json.dumps(item))
    assert [p.candidate.label for p in inbox.offers()] == ["one"]
    assert sorted(p.name for p in (folder / "put-aside").glob("*.json")) == [
        "1-proposal-torn.json",
        "2-proposal-forged.json",
    ]
    assert "but the content makes it" in (folder / "put-aside" / "2-proposal-forged.json.why").read_text()


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("rumour", "x", "not a kind"),
        ("finding", " \u202e\x1b ", "is empty"),
        ("finding", "x" * (MAX_CHARS + 1), "characters"),
    ],
)
def test_a_post_that_says_nothing_or_too_much_is_refused(kind: str, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_post("person", kind, text)


def test_a_post_shows_nothing_that_cannot_be_seen() -> None:
    assert make_post("person", "finding", "fused\x1b[2J\u200b gate\n\tup\u202e").text == "fused[2J gate\n\tup"
