"""From the inbox into the ledger: what agents, MCP clients and people handed in becomes events, and proposals to be measured.

    inbox ─► notes ─► `post`, `reply` events ─┐
          └► offers ─► `proposal` events ─────┴► durable ─► the files go ─► new proposals for the loop

Called by the loop between measurements; it never waits. A crash in between leaves files that are taken again: a candidate that the
ledger knows is not proposed twice, and a note counts once by its id. What is not here: which of them is measured, and when.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.journal import Journal
from hotpass.decode import json_safe
from hotpass.records.candidate import Candidate, Proposal
from search.inbox import Inbox


class Intake:
    """The loop's hand in the inbox of its campaign."""

    def __init__(self, inbox: Inbox, journal: Journal, keep: Callable[[Candidate], object]) -> None:
        """`keep` writes a candidate's sources to the campaign's store, before the log names it."""
        self.inbox = inbox
        self.journal = journal
        self.keep = keep

    def take(self, limit: int = 1_000_000) -> list[Proposal]:
        """Proposals that are new to the ledger, at most `limit`, recorded durably together with every note that waited."""
        notes, offers = self.inbox.notes(), self.inbox.offers(limit)
        if not notes and not offers:
            return []
        state, new = self.journal.state, list[Proposal]()
        for note in notes:
            if note.note_id not in state.note_ids:
                self.journal.write(note.kind, {"note_id": note.note_id, **json_safe(note.content)})
        for offer in offers:
            if offer.candidate.id not in state.candidates:
                self.keep(offer.candidate)
                self.journal.propose(offer)
                new.append(offer)
        self.journal.settle()
        self.inbox.taken([*notes, *offers])
        return new
