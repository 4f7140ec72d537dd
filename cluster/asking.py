"""The proposer off the driver: asked ahead of need on a thread of its own, told in order, and never waited for by an engine.

    loop ── ask(turn, incumbent, source), tell(candidate, attempt) ──► one queue ──► proposer ──► Answer ──► loop

Commands are worked off one at a time in the order in which the loop gave them, which is that of their events in the log: what the
proposer draws is therefore a function of the log, whatever the threads did. Where engine and proposer share a few cores, everything
happens in the caller's thread instead, between measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.ports import Proposer, answered
from hotpass.records.candidate import Candidate, Proposal
from hotpass.records.measurement import Attempt
from search.proposers import Proposer as Who


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a command came to, and how the proposer stands after it."""

    proposal: Proposal | None = None
    """None after a tell, or when the source had nothing."""
    borrowed: tuple[str, ...] = ()
    """Candidates whose attempts the control took from others (`Proposer.drain_borrowed`)."""
    sources: tuple[str, ...]
    broken: Mapping[str, str]
    exhausted: str
    random_state: str
    space: str
    """Version of the space: another one when a new part has joined it."""


class Asker:
    """The loop's hand on a proposer."""

    def __init__(self, proposer: Proposer, *, ahead: bool) -> None:
        self._proposer = proposer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="proposer") if ahead else None
        self.last = self._stand()
        """The latest answer: a moment old while commands are under way."""

    def ask(self, incumbent: Candidate, source: str) -> Future[Answer]:
        def work() -> Answer:
            if source == Who.SERVING:
                return self._stand(self._proposer.ask_serving(incumbent))
            return self._stand(self._proposer.ask(incumbent, source))

        return self._do(work)

    def tell(self, candidate: Candidate, attempt: Attempt) -> Future[Answer]:
        def work() -> Answer:
            self._proposer.tell(candidate, attempt)
            return self._stand()

        return self._do(work)

    def seen(self, candidate: Candidate) -> Future[Answer]:
        """Somebody else proposed it."""

        def work() -> Answer:
            self._proposer.seen([candidate])
            return self._stand()

        return self._do(work)

    def give_up(self, candidate: Candidate) -> Future[Answer]:
        def work() -> Answer:
            self._proposer.give_up(candidate)
            return self._stand()

        return self._do(work)

    def close(self) -> None:
        """What was not begun is not done."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _do(self, work: Callable[[], Answer]) -> Future[Answer]:
        return answered(work) if self._pool is None else self._pool.submit(work)

    def _stand(self, proposal: Proposal | None = None) -> Answer:
        proposer = self._proposer
        self.last = Answer(
            proposal=proposal,
            borrowed=tuple(proposer.drain_borrowed()),
            sources=proposer.sources(),
            broken=dict(proposer.broken),
            exhausted=proposer.exhausted,
            random_state=proposer.random_state,
            space=proposer.space_version,
        )
        return self.last
