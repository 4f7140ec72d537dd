"""What engines will measure next: proposals of all origins, in turns, built, in a short queue by tier and reload class.

    inbox (agents, MCP, people) ─┐
    resumed, continued ──────────┼─► turn (search.scheduler.Shares) ─► builder ─► ready ─► next_for(engine)
    proposer, asked ahead ───────┘

Whose turn it was, from among whom, and what was passed over are decisions in the log. Nothing here waits for anybody: who has nothing
now is not asked. What is not here: engines and their answers (`cluster.loop`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from actors.builder import Built
from cluster.asking import Answer, Asker
from cluster.building import Foreseen
from cluster.intake import Intake
from cluster.pending import Answers
from cluster.ports import BuilderPort
from cluster.predicting import Decision as Expected
from cluster.predicting import Foresight
from cluster.rules import may_still_lead, serving_is_due
from cluster.session import Session
from cluster.state import AttemptRow
from hotpass.canonical import to_plain
from hotpass.errors import MachineError
from hotpass.records.candidate import Candidate, Proposal
from hotpass.records.measurement import Attempt, Tier, Verdict
from search.proposers import Proposer as Who
from search.proposers import lowest_tier
from search.scheduler import Ready, is_short, pick, reload_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What an engine gets."""

    item: Ready
    before: tuple[str, ...]
    """Ids of candidates that came before it and had to wait, since too many of their kind are being measured."""


class Supply:
    """Of one search. Used by the loop's thread alone."""

    def __init__(
        self,
        session: Session,
        asker: Asker,
        builder: BuilderPort,
        answers: Answers,
        *,
        first: Iterable[Proposal],
        intake: Intake | None,
        broken_machine: Callable[[str, MachineError], None],
        foreseen: Foreseen | None = None,
    ) -> None:
        """`broken_machine` counts a builder that was lost, and raises when the machine is to be given up. `foreseen`: what is built
        beside a build, one at a time; nothing by default."""
        self.session, self.state, self.journal = session, session.state, session.journal
        self.asker, self.builder, self.answers, self.intake = asker, builder, answers, intake
        self._broken_machine = broken_machine
        self.foresight = Foresight(session.state, session.candidates, session.plan.spec.seed)
        self.waiting: deque[Proposal] = deque(first)
        """Proposals that were made but not measured: of an interrupted session, or of a campaign that is continued."""
        self.offers: dict[str, deque[Candidate]] = {}
        """Handed in by others, by arm."""
        self.ready: deque[Ready] = deque()
        self._foreseen = foreseen
        self.num_beside = 0
        """Builds under way that nobody has asked for yet."""
        self._built: dict[str, Built] = {}
        """Candidate id → what building it took, until its first order tells the log."""
        self._beside = 0.0
        """Core-seconds of builds that nobody had asked for, until the next order tells the log."""
        self.num_asking = self.num_building = self.num_telling = 0
        self._no_serving_for = ""
        """The incumbent for which no setting of the serving loop is left."""
        self._space = ""

    def begin(self) -> None:
        """The space that the search begins in is on record before anything is drawn from it."""
        self._note_space(self.asker.last)

    @property
    def incumbent(self) -> Candidate:
        return self.session.candidates[self.state.incumbent_id]

    @property
    def is_idle(self) -> bool:
        """Nobody is thinking, building or learning."""
        return not (self.num_asking or self.num_building or self.num_beside or self.num_telling)

    @property
    def is_empty(self) -> bool:
        """Nothing is ready, and nobody has anything to propose."""
        return not (self.ready or self.waiting or self._arms())

    def decide(self, decision: str, **facts: Any) -> None:
        self.journal.decide(decision, random_state=self.asker.last.random_state, **facts)

    def take_in(self) -> None:
        """What others handed in is recorded, and waits for its turn."""
        if self.intake is None:
            return
        for proposal in self.intake.take():
            self.offers.setdefault(proposal.proposer, deque()).append(proposal.candidate)
            self._learning(self.asker.seen(proposal.candidate))

    def fill(self, wanted: int) -> None:
        """Have so many ready, or on the way, as far as anybody has something."""
        while is_short(self.ready, self.num_building + self.num_asking, wanted) and self._take_turn():
            self.answers.take()

    def put(self, candidate: Candidate, tier: Tier | None = None, *, first: bool = False) -> None:
        """Ready to be measured; on the lowest tier that can tell, unless one is given."""
        item = self.as_ready(candidate, tier)
        (self.ready.appendleft if first else self.ready.append)(item)

    def as_ready(self, candidate: Candidate, tier: Tier | None = None) -> Ready:
        tier = tier or lowest_tier(candidate, self.incumbent)
        return Ready(candidate=candidate, tier=tier, reload=reload_of(candidate))

    def next_for(self, running: Sequence[Ready], num_engines: int) -> Chosen | None:
        """What an idle engine gets, taken off the queue; None when nothing is ready."""
        index, passed = pick(self.ready, running, num_engines)
        if index is None:
            return None
        chosen = Chosen(item=self.ready[index], before=tuple(self.ready[number].candidate.id for number in passed))
        del self.ready[index]
        return chosen

    def race(self) -> None:
        """Of those that wait for the slow tier, who cannot lead any more leaves and the surest goes first; for the others the tier
        that can tell them from the incumbent may have changed."""
        promoted, rest = list[Ready](), list[Ready]()
        for item in self.ready:
            is_promoted = item.tier is Tier.SLOW and self.state.fast_speedup(item.candidate.id) is not None
            (promoted if is_promoted else rest).append(item)
        staying = [item for item in promoted if may_still_lead(self.state, item.candidate.id)]
        for item in promoted:
            if item not in staying:
                self.decide("passed-over", candidate_id=item.candidate.id, reason="another one leads by more now")
        staying.sort(key=lambda item: -self._fast_low(item.candidate))
        again = [item for item in rest if self.state.attempts_of(item.candidate.id)]
        new = self.foresight.ordered([item for item in rest if item not in again], lambda item: item.candidate)
        self.ready = deque([*staying, *(self.as_ready(item.candidate) for item in (*again, *new))])

    def tell(self, candidate: Candidate, attempt: Attempt) -> None:
        """The proposer learns."""
        self._learning(self.asker.tell(candidate, attempt))

    def give_up(self, candidate: Candidate) -> None:
        """Its measurement was lost: the proposer expects no answer any more."""
        self._learning(self.asker.give_up(candidate))

    def is_audit(self, candidate: Candidate) -> bool:
        """It was to be left out, and has not been looked at yet."""
        expected = self.state.predictions.get(candidate.id)
        return expected is not None and expected.decision == Expected.AUDIT and not self.state.attempts_of(candidate.id)

    def audited(self, candidate: Candidate, row: AttemptRow) -> None:
        """The search expects no answer of what it would have left out, unless that was wrong: then it is measured as any other."""
        self.give_up(candidate)
        if row.attempt.verdict is Verdict.FASTER:
            self.put(candidate, row.attempt.tier, first=True)

    def _fast_low(self, candidate: Candidate) -> float:
        fast = self.state.fast_speedup(candidate.id)
        return fast.low if fast else 0.0

    def _take_turn(self) -> bool:
        """The next proposal is begun; False when nobody has one."""
        if self.waiting:
            self._take_up(self.waiting.popleft())
            return True
        arms = self._arms()
        if not arms:
            return False
        turn, arm = self.state.num_turns, self.state.shares.choose(arms)
        offered = self.offers[arm].popleft() if arm in self.offers else None
        self.decide("turn", turn=turn, arm=arm, arms=arms, candidate_id=offered.id if offered else "")
        if offered is not None:
            self._build(offered)
        else:
            self.num_asking += 1
            incumbent = self.incumbent
            self.answers.expect(
                self.asker.ask(incumbent, arm), lambda future: self._asked(future, turn, arm, incumbent)
            )
        return True

    def _take_up(self, proposal: Proposal) -> None:
        if proposal.candidate.id not in self.state.candidates:
            self.session.keep(proposal.candidate)
            self.journal.propose(proposal)
        self._build(proposal.candidate)

    def _arms(self) -> list[str]:
        """Who has something: others, then a setting of the serving loop when it is time for one, then the search's own."""
        self.offers = {arm: offered for arm, offered in self.offers.items() if offered}
        arms = [*sorted(self.offers, key=lambda arm: arm != Who.PERSON), *self.asker.last.sources]
        is_open = self._no_serving_for != self.state.incumbent_id
        if is_open and serving_is_due(self.state, self.session.plan, nothing_else=not arms and self.is_idle):
            return [Who.SERVING.value]
        return arms

    def _asked(self, future: Future[Answer], turn: int, arm: str, incumbent: Candidate) -> None:
        self.num_asking -= 1
        answer = self._heard(future)
        if answer.proposal is None:
            self.decide("nothing-left", turn=turn)
            if arm == Who.SERVING:
                self._no_serving_for = incumbent.id
            return
        self.session.keep(answer.proposal.candidate)
        self.journal.propose(answer.proposal, turn)
        self._build(answer.proposal.candidate)

    def _build(self, candidate: Candidate) -> None:
        """Unless nothing can come of it; what is expected of it is in the log either way."""
        expected = self.foresight.consider(candidate)
        self.journal.write("prediction", to_plain(expected))
        if expected.decision is Expected.PRUNE:
            self.give_up(candidate)
        else:
            self._submit(candidate)

    def _submit(self, candidate: Candidate) -> None:
        self.num_building += 1
        self.session.view.activity("builder", candidate.label if candidate.parts else "")
        self.answers.expect(self.builder.submit(candidate), lambda future: self._is_built(future, candidate))

    def build_beside(self) -> None:
        """Beside a build that takes its time, one that is foreseen."""
        beside = self._foreseen.next() if self._foreseen and not self.num_beside else None
        if beside is not None:
            self.num_beside += 1
            self.answers.expect(beside, self._built_beside)

    def _built_beside(self, future: Future[Built]) -> None:
        """Whether it can be built is told when it is proposed."""
        self.num_beside -= 1
        try:
            self._beside += future.result().core_seconds
        except MachineError as error:
            self._broken_machine("builder", error)

    def take_cost(self, candidate_id: str) -> Built | None:
        """What building the candidate took, for its order; with what was built beside it. None after the first order."""
        built, beside = self._built.pop(candidate_id, None), self._beside
        if built is None:
            return None
        self._beside = 0.0
        return replace(built, core_seconds=built.core_seconds + beside)

    def _is_built(self, future: Future[Built], candidate: Candidate) -> None:
        self.num_building -= 1
        self.session.view.activity("builder", "")
        try:
            built = future.result()
        except MachineError as error:
            self._broken_machine("builder", error)
            self._submit(candidate)
            return
        if built.failure is None:
            self._built[candidate.id] = built
            self.put(candidate)
        else:
            self.tell(candidate, self.session.fail_build(candidate, self.incumbent, built.failure, built).attempt)

    def _learning(self, future: Future[Answer]) -> None:
        self.num_telling += 1
        self.answers.expect(future, self._learned)

    def _learned(self, future: Future[Answer]) -> None:
        self.num_telling -= 1
        self._heard(future)

    def _heard(self, future: Future[Answer]) -> Answer:
        """What the proposer gives up on, and what its control took over from others, are decisions, once each."""
        answer = future.result()
        for what, reason in answer.broken.items():
            if what not in self.state.broken:
                self.decide("broken", what=what, reason=reason)
        for candidate_id in answer.borrowed:
            self.decide("borrowed", candidate_id=candidate_id)
        self._note_space(answer)
        return answer

    def _note_space(self, answer: Answer) -> None:
        """A part that joined opens another version of the space, and of the study over it."""
        if answer.space != self._space:
            self.decide("space", version=answer.space, previous=self._space)
            self._space = answer.space
