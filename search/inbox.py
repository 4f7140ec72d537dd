"""The inbox of a campaign: what proposers outside of the loop (agents, MCP clients, people) hand in, and where the loop finds it.

    submit(proposal) ─► checked ─► one file ─┐
    tell(post | call) ──────────► one file ──┴► loop: offers(), notes() ─► events, durable ─► taken(): the files go

A folder of small files, written whole or not at all: any process on the campaign's machine can hand something in, nothing is lost
when either side dies, and the loop never waits for anybody. Proposers learn results from the ledger only; nobody is called back.
It is a queue, not a store: what the loop has recorded is deleted here, and is then known by the ledger's events.

Safe for any number of processes that hand in, and one loop. What is not here: whose proposal is measured next (the scheduler).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from hotpass.canonical import content_hash
from hotpass.decode import DecodeError, from_plain, json_safe
from hotpass.errors import MachineError
from hotpass.records.candidate import Candidate, Proposal
from hotpass.records.measurement import Attempt
from search.agents.spend import LlmCall
from search.board import Post

FOLDER = "inbox"
"""In the campaign folder."""

MAX_WAITING = 16
"""Proposals of one author that may wait: engines cannot be flooded, and a proposer should learn from results before it goes on."""

_counter = itertools.count()


class Standing(StrEnum):
    """Where a submission stands while it has no attempt."""

    QUEUED = "queued"
    """Handed in; the loop has not taken it yet."""
    PROPOSED = "proposed"
    """In the ledger, not measured yet."""
    KNOWN = "known"
    """The same candidate was proposed before, perhaps by somebody else: its results are the answer."""
    REFUSED = "refused"
    """Not handed in; `reason` says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The answer to a submission, and what to ask for its result with."""

    request_id: str
    candidate_id: str
    standing: Standing
    reason: str = ""
    """Why it was refused, else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something for the ledger that asks for no measurement."""

    kind: str
    """Kind of event: `post` or `reply`."""
    note_id: str
    """Recorded with it, so that a note that is taken twice (after a crash in between) counts once."""
    content: Post | LlmCall


class Ledger(Protocol):
    """What the proposers' end reads of the campaign's log."""

    def is_proposed(self, candidate_id: str) -> bool: ...

    def attempts_of(self, candidate_id: str) -> Sequence[Attempt]:
        """In order; empty for an unknown candidate."""
        ...


class Inbox:
    """Both ends of a campaign's inbox. The loop's end needs no ledger and checks nothing again."""

    def __init__(
        self,
        campaign: Path,
        *,
        admits: Callable[[Candidate], str] = lambda candidate: "",
        ledger: Ledger | None = None,
    ) -> None:
        """`admits` gives the reason why a candidate cannot be measured in this campaign, empty when it can."""
        self.folder = Path(campaign) / FOLDER
        self._admits = admits
        self._ledger = ledger
        self._handed_out: dict[str, list[Path]] = {}
        """Candidate or note id → files that were handed to the loop and are not taken yet."""
        self._lock = threading.Lock()

    def submit(self, proposal: Proposal, author: str, request_id: str) -> Ticket:
        """Hand in a proposal, once for each request id of an author: a second call gives the same answer. Raises MachineError.

        The proposal's `proposer` becomes `author`.
        """
        candidate = proposal.candidate
        ticket = Ticket(request_id=request_id, candidate_id=candidate.id, standing=Standing.QUEUED)
        key = content_hash([author, request_id])[:24]
        with self._lock:
            mine = [(path, item) for path, item in self._items("proposal") if item["author"] == author]
            for path, item in mine:
                if path.stem.endswith(key):
                    same = item["content"]["candidate"]["id"] == candidate.id
                    reason = "" if same else f"the request id {request_id!r} was used for another candidate"
                    return ticket if same else replace(ticket, standing=Standing.REFUSED, reason=reason)
            if self._ledger is not None and self._ledger.is_proposed(candidate.id):
                return replace(ticket, standing=Standing.KNOWN)
            if any(item["content"]["candidate"]["id"] == candidate.id for _, item in self._items("proposal")):
                return replace(ticket, standing=Standing.KNOWN)
            reason = self._admits(candidate)
            if not reason and len(mine) >= MAX_WAITING:
                reason = f"{len(mine)} proposals of yours wait; read their results first"
            if reason:
                return replace(ticket, standing=Standing.REFUSED, reason=reason)
            self._write("proposal", key, author, replace(proposal, proposer=author))
        return ticket

    def result(self, ticket: Ticket) -> Attempt | Standing:
        """The latest attempt of the candidate, else where it stands. Reads the ledger, so it is right in any process."""
        if ticket.standing is Standing.REFUSED:
            return Standing.REFUSED
        if self._ledger is None:
            raise ValueError("an inbox without a ledger knows no results")
        attempts = self._ledger.attempts_of(ticket.candidate_id)
        if attempts:
            return attempts[-1]
        return Standing.PROPOSED if self._ledger.is_proposed(ticket.candidate_id) else Standing.QUEUED

    def waiting(self, author: str) -> int:
        """Proposals of this author that the loop has not taken yet."""
        return sum(item["author"] == author for _, item in self._items("proposal"))

    def waiting_calls(self, author: str) -> list[LlmCall]:
        """Calls of this author that the loop has not taken yet."""
        return [from_plain(LlmCall, item["content"]) for _, item in self._items("reply") if item["author"] == author]

    def tell(self, content: Post | LlmCall) -> str:
        """Hand in something for the ledger alone; returns its id. Raises MachineError."""
        key = content_hash([os.getpid(), time.time_ns(), next(_counter)])[:24]
        self._write("post" if isinstance(content, Post) else "reply", key, content.author, content)
        return key

    def offers(self, limit: int = 1_000_000) -> list[Proposal]:
        """Proposals that wait, oldest first, each once in the life of this object (again after a restart, unless `taken`)."""
        found: list[Proposal] = []
        for path, item in self._items("proposal"):
            if len(found) >= limit:
                break
            candidate_id = item["content"]["candidate"]["id"]
            if path in self._handed_out.get(candidate_id, ()):
                continue
            try:
                found.append(from_plain(Proposal, item["content"]))
            except DecodeError as error:
                self._put_aside(path, str(error))
                continue
            self._handed_out.setdefault(candidate_id, []).append(path)
        return found

    def notes(self) -> list[Note]:
        """Posts and calls that wait, oldest first, each once in the life of this object unless `taken`."""
        found: list[Note] = []
        for kind, record in (("post", Post), ("reply", LlmCall)):
            for path, item in self._items(kind):
                if path in self._handed_out.get(item["id"], ()):
                    continue
                try:
                    content: Any = from_plain(record, item["content"])
                except DecodeError as error:
                    self._put_aside(path, str(error))
                    continue
                self._handed_out.setdefault(item["id"], []).append(path)
                found.append(Note(kind=kind, note_id=item["id"], content=content))
        return found

    def taken(self, things: Iterable[Proposal | Note]) -> None:
        """These are durable in the ledger: their files go."""
        for thing in things:
            key = thing.candidate.id if isinstance(thing, Proposal) else thing.note_id
            for path in self._handed_out.pop(key, []):
                path.unlink(missing_ok=True)

    def _items(self, kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Files of one kind in the order in which they were handed in; what is no whole item is put aside."""
        for path in sorted(self.folder.glob(f"*-{kind}-*.json")):
            try:
                item = json.loads(path.read_text(encoding="utf-8"))
                is_whole = item["kind"] == kind and isinstance(item["author"], str) and isinstance(item["id"], str)
                if kind == "proposal":
                    is_whole = is_whole and isinstance(item["content"]["candidate"]["id"], str)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._put_aside(path, str(error))
                continue
            if is_whole:
                yield path, item
            else:
                self._put_aside(path, "is not an item of an inbox")

    def _put_aside(self, path: Path, why: str) -> None:
        """Something that nobody handed in through this class: kept for a look, never read again."""
        with contextlib.suppress(OSError):
            target = self.folder / "put-aside"
            target.mkdir(exist_ok=True)
            path.rename(target / path.name)
            (target / f"{path.name}.why").write_text(why, encoding="utf-8")

    def _write(self, kind: str, key: str, author: str, content: object) -> None:
        text = json.dumps(
            {"kind": kind, "id": key, "author": author, "content": json_safe(content)}, ensure_ascii=False
        )
        name = f"{time.time_ns():020d}-{kind}-{key}.json"
        temporary = self.folder / f".{name}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.folder / name)
        except OSError as error:
            raise MachineError(f"nothing can be handed in to {self.folder}: {error.strerror}") from error
