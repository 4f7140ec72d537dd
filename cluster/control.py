"""The control: a search of its own without agents, on a fixed share of the engine time, to tell what the agents were worth.

    main (learns everything) ──────────┐
                                       ├─► sources, ask, tell: one proposer for the loop
    control (catalogue alone, learns ──┘
             what it asked for itself)

Both are measured against the same incumbent, and a candidate is measured once: what the control asks for after others had it measured it
is told, and charged for ("borrowed"). It follows its own leader, never the main search's, so that no agent's part reaches it. The main
search does see the control's results; what the agents were worth is therefore read from the control's own line, not from the difference
of two campaigns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.proposing import StudyProposer
from hotpass.records.candidate import AS_LOADED, Candidate, Proposal
from hotpass.records.measurement import Attempt, Tier
from search.scheduler import CONTROL

MAX_BORROWED = 20
"""Candidates that one ask may borrow before the loop gets its turn again."""


class Controlled:
    """Implements `cluster.ports.Proposer`: a proposer with a control beside it."""

    def __init__(self, main: StudyProposer, control: StudyProposer, kind: str, mine: Iterable[str] = ()) -> None:
        """`kind` is `random` or `optuna`; `mine`: what the control asked for in earlier sessions, or borrowed."""
        self.main, self.control = main, control
        self.kind = kind
        self._mine = set(mine)
        self._shared: set[str] = set()
        """What the control wants too, while it is being measured for others."""
        self._open: set[str] = set()
        """Proposed by others, without an attempt yet."""
        self._attempts: dict[str, Attempt] = {}
        """The fast attempt of each candidate of others that has one."""
        self._borrowed: list[str] = []
        self._leader, self._leads_by = AS_LOADED, 0.0
        self._waits = False
        """The control found nothing that is not being measured; until the next answer."""

    def sources(self) -> tuple[str, ...]:
        has_more = not self._waits and bool(self.control.sources())
        return (*self.main.sources(), CONTROL) if has_more else self.main.sources()

    def ask(self, incumbent: Candidate, source: str = "") -> Proposal | None:
        if source == CONTROL:
            return self._ask_control()
        proposal = self.main.ask(incumbent, source)
        if proposal is not None:
            self._open.add(proposal.candidate.id)
        return proposal

    def ask_serving(self, incumbent: Candidate) -> Proposal | None:
        return self.main.ask_serving(incumbent)

    def seen(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            self._open.add(candidate.id)
            self.main.seen([candidate])

    def tell(self, candidate: Candidate, attempt: Attempt) -> None:
        self._waits = False
        self._open.discard(candidate.id)
        self.main.tell(candidate, attempt)
        if candidate.id in self._shared:
            self._shared.discard(candidate.id)
            self._borrowed.append(candidate.id)
            self._mine.add(candidate.id)
        if candidate.id in self._mine:
            self._learn(candidate, attempt)
        elif attempt.tier is Tier.FAST:
            self._attempts[candidate.id] = attempt

    def give_up(self, candidate: Candidate) -> None:
        self.main.give_up(candidate)
        self.control.give_up(candidate)

    def drain_borrowed(self) -> Sequence[str]:
        found, self._borrowed = tuple(self._borrowed), []
        return found

    @property
    def exhausted(self) -> str:
        return self.main.exhausted

    @property
    def broken(self) -> Mapping[str, str]:
        return self.main.broken

    @property
    def space_version(self) -> str:
        return self.main.space_version

    @property
    def random_state(self) -> str:
        return f"{self.main.random_state} {self.control.random_state}"

    def _ask_control(self) -> Proposal | None:
        for _ in range(MAX_BORROWED):
            proposal = self.control.ask(self._leader)
            if proposal is None:
                return None
            candidate = proposal.candidate
            if candidate.id in self._attempts:
                self._mine.add(candidate.id)
                self._borrowed.append(candidate.id)
                self._learn(candidate, self._attempts.pop(candidate.id))
            elif candidate.id in self._open:
                self._shared.add(candidate.id)
            else:
                self._mine.add(candidate.id)
                self.main.seen([candidate])
                return replace(proposal, proposer=f"{CONTROL}:{self.kind}")
        self._waits = not self._borrowed
        return None

    def _learn(self, candidate: Candidate, attempt: Attempt) -> None:
        self.control.study.anchor(attempt.incumbent_id, self.main.study)
        self.control.tell(candidate, attempt)
        value = self.control.study.values.get(candidate.id, 0.0)
        if value > self._leads_by:
            self._leader, self._leads_by = candidate, value
