"""The search of a campaign: while the budget lasts, each idle engine gets the most useful order there is.

    promotions ─┐
    resumed ────┼─► order ─► engine ─► settle (judge, record) ─► tell the proposer ─► promote? ─► new incumbent?
    proposals ──┘     ▲
         └─► builder ─┘   (ahead of the engines where there are cores for it, in between measurements where there are not)

Each turn reads the state that the journal folded, so a session that resumes another one continues its loop. What is not here:
how a candidate is measured and judged (`cluster.session`) and what is claimed of the winner (`cluster.finish`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from actors.engine import Measured
from cluster.ports import BuilderPort, EnginePort, Proposer
from cluster.rules import (
    becomes_incumbent,
    decides_alone,
    deserves_second_look,
    deserves_slow_tier,
    serving_is_due,
    stop_reason,
)
from cluster.session import Order, Session
from cluster.state import SEARCHING, AttemptRow
from hotpass.errors import MachineError
from hotpass.records.candidate import Candidate, Proposal
from hotpass.records.measurement import Attempt, Failure, Purpose, Tier
from search.policy import machine_suspect
from search.proposers import lowest_tier

ERROR_BUDGET = 3
"""Machine errors in a row after which the campaign stops and says so: one may be chance, three are a broken machine."""


class SearchLoop:
    """Runs until there is a reason to stop; the reason is a decision in the log."""

    def __init__(
        self,
        session: Session,
        proposer: Proposer,
        builder: BuilderPort,
        *,
        build_ahead: bool,
        first: Mapping[str, Proposal] | None = None,
        halt: threading.Event | None = None,
    ) -> None:
        self.session = session
        self.state = session.state
        self.journal = session.journal
        self.proposer = proposer
        self.builder = builder
        self.build_ahead = build_ahead
        self.waiting: deque[Proposal] = deque((first or {}).values())
        """Proposals that were made but not measured: of an interrupted session, or of a campaign that is continued."""
        self.promotions: deque[Candidate] = deque()
        self.ready: deque[Candidate] = deque()
        self.building: dict[Future[Failure | None], Candidate] = {}
        self.running: dict[Future[Measured], Order] = {}
        self.halt = halt or threading.Event()
        self.exhausted = False
        self.errors_in_a_row = 0

    def run(self) -> str:
        """The reason why the search stopped. Raises MachineError when the machine does not work."""
        self._take_up()
        while True:
            if self.halt.is_set():
                raise KeyboardInterrupt
            reason = stop_reason(self.state, self.session.plan, self.journal.clock.seconds())
            if not reason:
                self._check_machine()
                self._prepare_candidates()
                self._fill_engines()
            if not self.running and not self.building and (reason or not self.ready):
                break
            self._take_answers()
        reason = reason or self.proposer.exhausted
        self.journal.decide("stop", random_state=self.proposer.random_state, reason=reason)
        self.journal.settle()
        return reason

    @property
    def incumbent(self) -> Candidate:
        return self.session.candidates[self.state.incumbent_id]

    def _idle(self) -> list[EnginePort]:
        busy = {order.engine.name for order in self.running.values()}
        return [engine for engine in self.session.engines if engine.name not in busy]

    def _prepare_candidates(self) -> None:
        """Propose and build so many that no engine waits, and none while one measures on the same few cores."""
        if self.running and not self.build_ahead:
            return
        wanted = len(self.session.engines) + (1 if self.build_ahead else 0) - len(self.promotions)
        while len(self.ready) + len(self.building) < wanted and not self.exhausted:
            proposal = self._next_proposal()
            if proposal is None:
                self.exhausted = True
                return
            candidate = proposal.candidate
            self.session.keep(candidate)
            if candidate.id not in self.state.candidates:
                self.journal.propose(proposal)
            self.session.view.activity("builder", candidate.label if candidate.parts else "")
            self.building[self.builder.submit(candidate)] = candidate
            self._take_builds()

    def _next_proposal(self) -> Proposal | None:
        """What waits from before, a setting of the serving loop when it is time for one, else the next of the search."""
        if self.waiting:
            return self.waiting.popleft()
        plan, found = self.session.plan, None
        if serving_is_due(self.state, plan, nothing_else=False):
            found = self.proposer.ask_serving(self.incumbent)
        found = found or self.proposer.ask(self.incumbent)
        if found is None and serving_is_due(self.state, plan, nothing_else=True):
            found = self.proposer.ask_serving(self.incumbent)
        return found

    def _check_machine(self) -> None:
        """After many failures with nothing in common, as loaded against itself: the machine may be broken, not the candidates."""
        since = [row.attempt for row in self.state.attempts]
        while any(attempt.purpose is Purpose.AA for attempt in since):
            since.pop(0)
        if self.running or not machine_suspect(since, self.session.candidates):
            return
        self.journal.decide("check", reason=f"the last {len(since)} attempts failed with no part in common")
        attempt = self.session.measure_own().attempt
        if not attempt.verdict.is_timed:
            raise MachineError(f"the deployment as loaded cannot be measured any more: {attempt.reason}")

    def _fill_engines(self) -> None:
        for engine in self._idle():
            if self.promotions:
                self._order(engine, self.promotions.popleft(), Tier.SLOW)
            elif self.ready:
                candidate = self.ready.popleft()
                self._order(engine, candidate, lowest_tier(candidate, self.incumbent))

    def _order(self, engine: EnginePort, candidate: Candidate, tier: Tier) -> None:
        seen = any(row.attempt.tier is tier for row in self.state.attempts_of(candidate.id))
        purpose = Purpose.REMEASURE if seen else Purpose.SEARCH
        order = self.session.order(engine, self.incumbent, candidate, tier, purpose)
        self.running[order.future] = order

    def _take_answers(self) -> None:
        pending: set[Future[Any]] = {*self.running, *self.building}
        if not pending:
            return
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        self._take_builds()
        for future in [future for future in self.running if future in done]:
            self._take_measurement(self.running.pop(future))

    def _take_builds(self) -> None:
        for future in [future for future in self.building if future.done()]:
            candidate = self.building.pop(future)
            failure = future.result()
            self.session.view.activity("builder", "")
            if failure is None:
                self.ready.append(candidate)
            else:
                self._tell(candidate, self.session.fail_build(candidate, self.incumbent, failure).attempt)

    def _take_measurement(self, order: Order) -> None:
        try:
            measured = order.future.result()
        except MachineError as error:
            self._machine_failed(order, error)
            return
        self.errors_in_a_row = 0
        row = self.session.settle(order, measured)
        candidate = order.assignment.candidate
        if deserves_second_look(self.state, row):
            (self.ready if order.assignment.tier is Tier.FAST else self.promotions).appendleft(candidate)
            return
        self._tell(candidate, row.attempt)
        if order.assignment.tier is Tier.SLOW:
            if becomes_incumbent(self.state, row):
                served = self.state.fast_speedup(candidate.id) is None
                why = "faster on the fast tier, and not slower on the slow one"
                self._install(candidate, row, "faster on the slow tier, which alone can tell" if served else why)
        elif deserves_slow_tier(self.state, row):
            self._promote(candidate, row)

    def _promote(self, candidate: Candidate, row: AttemptRow) -> None:
        if decides_alone(self.state, row):
            self._install(candidate, row, "decisively faster than as loaded on the fast tier")
            return
        self.journal.decide(
            "promote", random_state=self.proposer.random_state, candidate_id=candidate.id, attempt_seq=row.seq
        )
        self.promotions.append(candidate)

    def _take_up(self) -> None:
        """The leader that an interrupted session measured on the fast tier, but not on the slow one: as if just measured."""
        rows = [
            row
            for row in self.state.attempts
            if row.attempt.tier is Tier.FAST
            and row.attempt.purpose in SEARCHING
            and row.attempt.candidate_id in self.session.candidates
            and deserves_slow_tier(self.state, row)
            and not any(r.attempt.tier is Tier.SLOW for r in self.state.attempts_of(row.attempt.candidate_id))
        ]
        if rows:
            row = max(rows, key=lambda r: r.speedup_vs_loaded.value if r.speedup_vs_loaded else 0.0)
            self._promote(self.session.candidates[row.attempt.candidate_id], row)

    def _tell(self, candidate: Candidate, attempt: Attempt) -> None:
        """The proposer learns; what it gives up on is a decision, once."""
        self.proposer.tell(candidate, attempt)
        for what, reason in self.proposer.broken.items():
            if what not in self.state.broken:
                self.journal.decide("broken", random_state=self.proposer.random_state, what=what, reason=reason)

    def _install(self, candidate: Candidate, row: AttemptRow, why: str) -> None:
        """A new incumbent; its ratio is that of the fast tier, which all others are chained by. On the fast tier's shapes one with
        new settings of the serving loop is its predecessor."""
        fast = self.state.fast_speedup(candidate.id) or self.state.lead
        self.journal.decide(
            "incumbent",
            random_state=self.proposer.random_state,
            candidate_id=candidate.id,
            attempt_seq=row.seq,
            speedup_vs_loaded=fast,
            why=why,
        )

    def _machine_failed(self, order: Order, error: MachineError) -> None:
        """The candidate gets another try; its order stays open in the log, so that it is never counted."""
        self.errors_in_a_row += 1
        self.session.ended()
        self.session.view.note(f"{order.engine.name}: {error}")
        self.session.view.activity(order.engine.name, "")
        self.journal.write(
            "lease",
            {"domain": "", "holder": order.engine.name, "state": "lost", "wait_seconds": 0.0, "reason": str(error)},
        )
        if self.errors_in_a_row >= ERROR_BUDGET:
            raise MachineError(f"{ERROR_BUDGET} machine errors in a row, the last one: {error}") from error
        if order.assignment.tier is Tier.FAST:
            self.ready.append(order.assignment.candidate)
        else:
            self.promotions.append(order.assignment.candidate)
