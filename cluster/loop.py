"""The search of a campaign: engines measure while proposers think and a builder builds.

    supply (proposals, in turns, built) ─► order ─► engine ─► settle (judge, record) ─► tell ─► look again, promote, new incumbent?

Each turn reads the state that the journal folded, so a session that resumes another one continues its loop. Where there are cores for
it, proposing and building go on beside measurements; elsewhere in between. What is not here: where proposals come from and whose turn
it is (`cluster.supply`), how a candidate is measured and judged (`cluster.session`), what follows from an attempt (`cluster.rules`),
and what is claimed of the winner (`cluster.finish`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from actors.engine import Measured
from cluster.asking import Asker
from cluster.building import Foreseen
from cluster.intake import Intake
from cluster.pending import Answers
from cluster.ports import BuilderPort, EnginePort, Proposer
from cluster.predicting import audits_won
from cluster.rules import Follow, needs_wider_cut, reaction_to, stop_reason, tau_between_tiers
from cluster.session import Order, Session
from cluster.state import SEARCHING, AttemptRow
from cluster.supply import Chosen, Supply
from hotpass.errors import MachineError
from hotpass.records.candidate import Candidate, Proposal
from hotpass.records.measurement import Attempt, Purpose, Tier, Verdict
from search.policy import RULES, machine_suspect

ERROR_BUDGET = 3
"""Machine errors in a row after which the campaign stops and says so: one may be chance, three are a broken machine."""
MAX_LOSSES = 2
"""Times that a candidate's measurement may be lost with an engine before the candidate is what is blamed."""
LEASE_GRACE_SECONDS = 900.0
"""Beyond an order's own deadline: waiting for the measuring lease, and for a port that restarts its engine by itself."""
POLL_SECONDS = 0.2
"""Between two looks into the inbox while nothing else happens."""
PATIENCE_SECONDS = 0.5
"""What is found built is told sooner: a build that takes longer gets another one beside it."""


def default_lease(order: Order) -> float:
    """Seconds after which an engine that was given this order counts as lost."""
    return order.assignment.deadline_seconds + LEASE_GRACE_SECONDS


class SearchLoop:
    """Runs until there is a reason to stop; the reason is a decision in the log."""

    def __init__(
        self,
        session: Session,
        proposer: Proposer,
        builder: BuilderPort,
        *,
        build_ahead: bool,
        foreseen: Foreseen | None = None,
        first: Mapping[str, Proposal] | None = None,
        halt: threading.Event | None = None,
        intake: Intake | None = None,
        expecting: Callable[[], bool] = lambda: False,
        lease_seconds: Callable[[Order], float] = default_lease,
    ) -> None:
        """`foreseen`: what is built beside a build that an engine waits for. `expecting` says whether somebody outside may still hand
        something in, so that an empty queue is not the end."""
        self.session, self.state, self.journal = session, session.state, session.journal
        self.build_ahead = build_ahead
        self.builder = builder
        self.expecting = expecting
        self.lease_seconds = lease_seconds
        self.halt = halt or threading.Event()
        self.answers = Answers()
        spec = session.plan.spec
        self.state.shares.control_share = spec.control_share if spec.control != "none" else 0.0
        self.asker = Asker(proposer, ahead=build_ahead)
        self.supply = Supply(
            session,
            self.asker,
            builder,
            self.answers,
            first=(first or {}).values(),
            intake=intake,
            broken_machine=self._count_error,
            foreseen=foreseen,
        )
        self.running: dict[Future[Measured], Order] = {}
        self.expires: dict[Future[Measured], float] = {}
        self.silent: dict[Future[Measured], Order] = {}
        """Orders whose lease expired: their engines get nothing until they answer, and the answer is late."""
        self.losses: Counter[str] = Counter()
        self.errors_in_a_row = 0

    def run(self) -> str:
        """The reason why the search stopped. Raises MachineError when the machine does not work."""
        try:
            reason = self._search()
        finally:
            self.asker.close()
        self.supply.decide("stop", reason=reason)
        self.journal.settle()
        return reason

    def _search(self) -> str:
        self.supply.begin()
        self._take_up()
        while True:
            if self.halt.is_set():
                raise KeyboardInterrupt
            self.supply.take_in()
            reason = stop_reason(self.state, self.session.plan, self.journal.clock.seconds())
            if not reason:
                self._check_machine()
                if not self.running or self.build_ahead:
                    self.supply.fill(len(self.session.engines) * (2 if self.build_ahead else 1))
                self._fill_engines()
            if not self.running and self.supply.is_idle and (reason or self._is_exhausted()):
                return reason or self.asker.last.exhausted or "nothing is left to try"
            self._wait()

    def _is_exhausted(self) -> bool:
        if len(self.silent) == len(self.session.engines):
            raise MachineError("no engine answers: each has an order that outlived its lease")
        return self.supply.is_empty and not self.expecting()

    def _idle(self) -> list[EnginePort]:
        busy = {order.engine.name for order in (*self.running.values(), *self.silent.values())}
        return [engine for engine in self.session.engines if engine.name not in busy]

    def _check_machine(self) -> None:
        """After many failures with nothing in common, as loaded against itself: the machine may be broken, not the candidates."""
        since: list[Attempt] = []
        for row in reversed(self.state.attempts):
            if row.attempt.purpose is Purpose.AA or len(since) == RULES.strange_failures:
                break
            since.insert(0, row.attempt)
        if self.running or not machine_suspect(since, self.session.candidates):
            return
        self.journal.decide("check", reason=f"the last {len(since)} attempts failed with no part in common")
        attempt = self.session.measure_own().attempt
        if not attempt.verdict.is_timed:
            raise MachineError(f"the deployment as loaded cannot be measured any more: {attempt.reason}")

    def _fill_engines(self) -> None:
        idle = self._idle()
        if not idle or not self.supply.ready or (self.supply.num_beside and not self.build_ahead):
            return
        self.supply.race()
        under_way = [self.supply.as_ready(o.assignment.candidate, o.assignment.tier) for o in self.running.values()]
        for engine in idle:
            chosen = self.supply.next_for(under_way, len(self.session.engines))
            if chosen is None:
                return
            self._order(engine, chosen)
            under_way.append(chosen.item)

    def _order(self, engine: EnginePort, chosen: Chosen) -> None:
        candidate, tier = chosen.item.candidate, chosen.item.tier
        seen = any(row.attempt.tier is tier for row in self.state.attempts_of(candidate.id))
        audit = tier is Tier.FAST and self.supply.is_audit(candidate)
        purpose = Purpose.REMEASURE if seen else Purpose.AUDIT if audit else Purpose.SEARCH
        built = self.supply.take_cost(candidate.id)
        order = self.session.order(
            engine, self.supply.incumbent, candidate, tier, purpose, before=chosen.before, built=built
        )
        self.running[order.future] = order
        self.expires[order.future] = time.monotonic() + self.lease_seconds(order)
        self.answers.expect(order.future, self._measured)

    def _wait(self) -> None:
        """Until something is answered, a lease expires, or it is time to look into the inbox again."""
        seconds = min((at - time.monotonic() for at in self.expires.values()), default=3600.0)
        if self.supply.intake is not None or self.expecting():
            seconds = min(seconds, POLL_SECONDS)
        waits_for_build = bool(self.supply.num_building) and not self.running
        if waits_for_build:
            seconds = min(seconds, PATIENCE_SECONDS)
        with self.journal.together():
            if not self.answers.wait(seconds) and waits_for_build:
                self.supply.build_beside()
            self._expire()

    def _measured(self, future: Future[Measured]) -> None:
        order = self.running.pop(future)
        del self.expires[future]
        try:
            measured = future.result()
        except MachineError as error:
            self.session.ended()
            self.session.view.activity(order.engine.name, "")
            self._count_error(order.engine.name, error)
            self._lost(order, "lost", str(error))
            return
        self.errors_in_a_row = 0
        self._react(order.assignment.candidate, self.session.settle(order, measured))

    def _react(self, candidate: Candidate, row: AttemptRow) -> None:
        """What the rules say follows from an attempt."""
        if row.attempt.purpose is Purpose.AUDIT:
            self.supply.audited(candidate, row)
            return
        reaction = reaction_to(self.state, row)
        if reaction.follow is Follow.LOOK_AGAIN:
            self.supply.put(candidate, row.attempt.tier, first=True)
            return
        self.supply.tell(candidate, row.attempt)
        self._go_on(candidate, row, reaction.follow, reaction.why)
        if row.attempt.tier is Tier.SLOW:
            self._widen()

    def _go_on(self, candidate: Candidate, row: AttemptRow, follow: Follow, why: str) -> None:
        if follow is Follow.PROMOTE:
            self.supply.decide("promote", candidate_id=candidate.id, attempt_seq=row.seq)
            self.supply.put(candidate, Tier.SLOW, first=True)
        elif follow is Follow.INSTALL:
            # Its ratio is that of the fast tier, which all others are chained by; on the fast tier's shapes one with new settings
            # of the serving loop is its predecessor.
            fast = self.state.fast_speedup(candidate.id) or self.state.lead
            self.supply.decide(
                "incumbent", candidate_id=candidate.id, attempt_seq=row.seq, speedup_vs_loaded=fast, why=why
            )

    def _take_up(self) -> None:
        """What an interrupted session left: audits that were won, and the leader that was measured on the fast tier, but not on the
        slow one, as if just measured."""
        known = self.session.candidates
        for key in audits_won(self.state):
            if key in known:
                self.supply.put(known[key], Tier.FAST, first=True)
        rows = [
            row
            for row in self.state.attempts
            if row.attempt.tier is Tier.FAST
            and row.attempt.purpose in SEARCHING
            and row.attempt.candidate_id in known
            and reaction_to(self.state, row).follow in (Follow.PROMOTE, Follow.INSTALL)
            and not any(r.attempt.tier is Tier.SLOW for r in self.state.attempts_of(row.attempt.candidate_id))
        ]
        if rows:
            row = max(rows, key=lambda r: r.speedup_vs_loaded.value if r.speedup_vs_loaded else 0.0)
            reaction = reaction_to(self.state, row)
            self._go_on(known[row.attempt.candidate_id], row, reaction.follow, reaction.why)

    def _widen(self) -> None:
        """Deeper cuts once the tiers disagree; when nothing is being measured, since every engine loads again."""
        if self.running or self.silent or not needs_wider_cut(self.state):
            return
        tau, pairs = tau_between_tiers(self.state)
        depths = self.session.widen()
        if depths:
            self.builder.widen()
        self.supply.decide("widen", tau=tau, pairs=pairs, layers=depths)

    def _expire(self) -> None:
        """Orders beyond their lease: the candidate gets another try, and an answer that still comes is late."""
        now = time.monotonic()
        for future in [future for future, at in self.expires.items() if at <= now]:
            del self.expires[future]
            order = self.silent[future] = self.running.pop(future)
            self.answers.instead(future, self._late)
            self.session.ended()
            self._lost(order, "expired", f"no answer within {self.lease_seconds(order):.0f} s")

    def _late(self, future: Future[Measured]) -> None:
        """Recorded, and never best: by now the candidate may have been measured elsewhere, against another incumbent."""
        order = self.silent.pop(future)
        if future.exception() is None and order.number not in self.state.tally.judged:
            reason = "late: the answer came after the lease had expired"
            self.session.record_attempt(order.number, _unmeasured(order, Verdict.INVALID, reason))

    def _count_error(self, name: str, error: MachineError) -> None:
        self.errors_in_a_row += 1
        self.session.view.note(f"{name}: {error}")
        if self.errors_in_a_row >= ERROR_BUDGET:
            raise MachineError(f"{ERROR_BUDGET} machine errors in a row, the last one: {error}") from error

    def _lost(self, order: Order, state: str, reason: str) -> None:
        """The candidate gets another try; its order stays open in the log, so that it is never counted. One that loses engine after
        engine is a candidate that failed."""
        candidate = order.assignment.candidate
        lease = {"domain": "", "holder": order.engine.name, "wait_seconds": 0.0, "assignment": order.number}
        self.journal.write("lease", {**lease, "state": state, "reason": reason})
        self.losses[candidate.id] += 1
        if self.losses[candidate.id] < MAX_LOSSES:
            self.supply.put(candidate, order.assignment.tier)
            return
        said = f"{MAX_LOSSES} engines were lost while they measured it; the last: {reason}"
        row = self.session.record_attempt(order.number, _unmeasured(order, Verdict.FAILED, said))
        self.supply.give_up(candidate)
        self.supply.tell(candidate, row.attempt)


def _unmeasured(order: Order, verdict: Verdict, reason: str) -> Attempt:
    assignment = order.assignment
    return Attempt(
        candidate_id=assignment.candidate.id,
        incumbent_id=assignment.incumbent.id,
        tier=assignment.tier,
        purpose=assignment.purpose,
        verdict=verdict,
        reason=reason,
        speedup=None,
        tokens_per_second=None,
    )
