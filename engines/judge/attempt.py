"""One assignment, from install to clean proof.

    pair child (or two fresh children) ─► incumbent on ─► incumbent alone ─► candidate on ─► rounds or replays ─► both off ─► clean?

A candidate's fault ends up in the result; the child it happened in is replaced when it is dead or not clean, and the next assignment
finds the engine as this one did. The machine's faults are raised.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.client import Child
from engines.judge.checks import merged
from engines.judge.clean import changed_while_installed, differences, weights_moved
from engines.judge.disturbance import behind_a_timeout, share_slower, waited_for
from engines.judge.inputs import InputSet, seed_of, window_tokens
from engines.judge.install import Installer
from engines.judge.pairing import Alternating, Pair, SideBySide, TwoProcesses
from engines.judge.reloads import can_be_proven, prove_reload
from engines.judge.replay import Replay, requests_for, run_replay
from engines.judge.rounds import Evidence, Place, Plan, Rounds
from engines.judge.served import check_served
from engines.judge.windows import run_window
from engines.program import CandidateFailed, Fingerprint, ReplayRequest
from engines.stable import PairChild, Stable, born, machine_fault
from hotpass.errors import EngineDied
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.measurement import (
    Assignment,
    CleanReport,
    Environment,
    Failure,
    FailureKind,
    MeasuredReplay,
    MeasureResult,
    Pairing,
    Purpose,
    ReloadReport,
    Side,
    Tier,
    TokenCheck,
)
from hotpass.stats import SequentialTest

ALONE_WINDOWS = 1
"""Windows of the incumbent on each row before the candidate comes, so that drift is not taken for disturbance."""

AFTER_WINDOWS = 2
"""The same after it, where its time beside the candidate needs explaining."""

SECOND_LOOK = 1.03
"""An incumbent slower than this beside the candidate is timed alone once more, after the candidate."""

CLEAN_SECONDS = 60.0
"""Deadline of restore and proof; a child that needs longer is replaced."""

REPLAY_TOKENS_SECONDS = 8.0
"""A replay of as loaded is meant to take about so long, where the assignment leaves it to the engine."""


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What has come of an assignment so far."""

    assignment: Assignment
    started: float
    evidence: Evidence = field(default_factory=Evidence)
    replays: list[MeasuredReplay] = field(default_factory=list)
    reloads: list[ReloadReport] = field(default_factory=list)
    phases_ms: dict[str, float] = field(default_factory=dict)
    tokens: TokenCheck | None = None
    failure: Failure | None = None
    clean: CleanReport | None = None
    changed_while_installed: list[str] = field(default_factory=list)
    weights_unchanged: bool = True
    disturbed: float = 1.0
    disturbed_support: float = 1.0
    before: dict[Place, list[float]] = field(default_factory=dict)
    """Place → seconds a step of each window of the incumbent just before the candidate was installed, or lately."""
    alone: dict[Place, float] = field(default_factory=dict)
    """Place → seconds a step of the incumbent before the candidate was installed: just now or lately, the slower."""
    noise_floor: float = 0.0
    pool: Mapping[Place, Sequence[InputSet]] | None = None
    """Input sets of this attempt alone; None for the engine's pool."""

    @property
    def deadline(self) -> float:
        return self.started + self.assignment.deadline_seconds

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases_ms[name] = self.phases_ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3


class Judge:
    """Carries out assignments with the processes of one engine."""

    def __init__(
        self,
        *,
        name: str,
        stable: Stable,
        installer: Installer,
        environment: Environment,
        fast_cuts: Sequence[int],
        whole_cut: int,
        concurrency: int,
        output_tokens_per_step: float,
        audited_share: float,
    ) -> None:
        self._name, self._stable, self._installer = name, stable, installer
        self._environment = environment
        self._fast_cuts, self._whole_cut = tuple(fast_cuts), whole_cut
        self._concurrency, self._tokens_per_step = concurrency, output_tokens_per_step
        self._audited_share = audited_share

    def measure(self, assignment: Assignment, requests: Sequence[ReplayRequest] = ()) -> MeasureResult:
        """Measure until the stopping rule is met or the deadline. `requests`: for the slow tier. Raises MachineError only."""
        apart = assignment.pairing is Pairing.TWO_PROCESSES
        birth = {} if apart else self._stable.pair().birth_ms()  # outside the candidate's time
        attempt = Attempt(assignment=assignment, started=time.monotonic(), phases_ms=birth)
        try:
            if not self._built(attempt):
                return self._result(attempt)
            if apart:
                self._in_two_processes(attempt, requests)
            else:
                self._in_one_child(attempt, requests)
            if self._is_audited(attempt):
                self._audit(attempt)
        except EngineDied as error:
            if not self._stable.keeper.alive():
                raise
            attempt.failure = Failure(
                kind=FailureKind.CRASH, message="the candidate ended the zygote", detail=str(error)[-2000:]
            )
            self._stable.revive_zygote()
        return self._result(attempt)

    def _is_audited(self, attempt: Attempt) -> bool:
        """A share of the search's sound attempts, by chance."""
        assignment = attempt.assignment
        sound = attempt.failure is None and attempt.clean is not None and attempt.clean.clean
        searched = assignment.purpose is Purpose.SEARCH and can_be_proven(assignment.incumbent, assignment.candidate)
        return sound and searched and self._rng(attempt, "audit").random() < self._audited_share

    def _audit(self, attempt: Attempt) -> None:
        """Warm equals cold, the incumbent comes back, and every byte of the weights is as it was loaded."""
        assignment = attempt.assignment
        with attempt.phase("audit"):
            try:
                proof = prove_reload(self._stable, self._installer, assignment.incumbent, assignment.candidate)
            except CandidateFailed as error:
                attempt.failure = error.failure
                return
            attempt.weights_unchanged &= self._stable.weights_hold()
        if not proof.holds:
            attempt.clean = CleanReport(clean=False, reasons=(f"reload: {proof.reason}",))

    def _built(self, attempt: Attempt) -> bool:
        """Files of both candidates, off the measuring time: a builder has usually made them before."""
        assignment = attempt.assignment
        try:
            with attempt.phase("build"):
                for candidate in (assignment.incumbent, assignment.candidate):
                    self._installer.build(candidate, attempt.deadline)
        except CandidateFailed as error:
            attempt.failure = error.failure
            return False
        attempt.started = time.monotonic()
        return True

    def _in_two_processes(self, attempt: Attempt, requests: Sequence[ReplayRequest]) -> None:
        places, assignment = self._places(attempt), attempt.assignment
        with contextlib.ExitStack() as children:
            with attempt.phase("fork"), machine_fault("fresh children"):
                a = children.enter_context(self._stable.fresh_child())
                b = children.enter_context(self._stable.fresh_child())
                for name, ms in (*born(a.phases_ms).items(), *born(b.phases_ms).items()):
                    attempt.phases_ms[name] = attempt.phases_ms.get(name, 0.0) + ms
                if assignment.purpose is Purpose.COLD:
                    attempt.pool = self._held_out(a, places, assignment.seed)
            pair = TwoProcesses(a, b, self._stable.kv, self._vocab)
            with attempt.phase("a against a"), machine_fault("A/A of fresh children"):
                self._a_against_a(attempt, pair, places)
            attempt.started = time.monotonic()
            try:
                with attempt.phase("install"):
                    self._install(attempt, a, Side.INCUMBENT, assignment.incumbent, places)
                if assignment.incumbent != AS_LOADED:
                    with attempt.phase("alone"):
                        taken = self._alone_seconds(attempt, a, places, "alone")
                    attempt.before = taken
                    attempt.alone = {place: statistics.median(seconds) for place, seconds in taken.items()}
                with attempt.phase("install"):
                    self._install(attempt, b, Side.CANDIDATE, assignment.candidate, places)
                self._measure_pair(attempt, pair, places, requests)
                attempt.disturbed = self._disturbance(attempt, a, b)
            except CandidateFailed as error:
                attempt.failure = self._cause(attempt, error.failure)

    def _a_against_a(self, attempt: Attempt, pair: TwoProcesses, places: Sequence[Place]) -> None:
        """Both children as loaded: the noise floor of two processes, and the incumbent's time beside one that does nothing."""
        for side in Side:
            child, name = pair.place(side)
            self._stable.load_contexts(child, name, places, time.monotonic() + CLEAN_SECONDS)
        patience, cold = self._stable.recipe.aa_seconds / 3, attempt.assignment.purpose is Purpose.COLD
        evidence, attempt.noise_floor = self._stable.a_against_a(pair, places, patience, held_out=cold)
        attempt.before = evidence.incumbent_seconds
        attempt.alone = {place: statistics.median(seconds) for place, seconds in evidence.incumbent_seconds.items()}

    def _held_out(self, incumbent: Child, places: Sequence[Place], seed: int) -> Mapping[Place, Sequence[InputSet]]:
        """A cold measurement shares no input with any search: sets, and references for them, of its own."""
        sets = self._stable.held_out_sets(places, seed)
        self._stable.load_contexts(incumbent, Side.INCUMBENT, places, time.monotonic() + CLEAN_SECONDS)
        self._stable.note_loaded(incumbent, sets)
        return sets

    def _in_one_child(self, attempt: Attempt, requests: Sequence[ReplayRequest]) -> None:
        pair_child = self._stable.pair()
        attempt.noise_floor = pair_child.noise_floor
        try:
            self._installed_and_measured(attempt, pair_child, requests)
        except CandidateFailed as error:
            attempt.failure = self._cause(attempt, error.failure)
        self._restore(attempt, pair_child)

    def _cause(self, attempt: Attempt, failure: Failure) -> Failure:
        lost = attempt.evidence.incumbent_lost_seconds
        return behind_a_timeout(failure, lost, time.monotonic() - attempt.started)

    def _installed_and_measured(
        self, attempt: Attempt, pair_child: PairChild, requests: Sequence[ReplayRequest]
    ) -> None:
        places, assignment, child = self._places(attempt), attempt.assignment, pair_child.child
        if assignment.pairing is Pairing.ALTERNATING:
            pair: Pair = Alternating(child, self._stable.kv, self._vocab, self._exchange(attempt, child, places))
        else:
            pair = SideBySide(child, self._stable.kv, self._vocab)
            if assignment.incumbent != AS_LOADED:
                with attempt.phase("install"):
                    self._install(attempt, child, Side.INCUMBENT, assignment.incumbent, places)
            with attempt.phase("alone"):
                self._incumbent_alone(attempt, pair_child, places)
            with attempt.phase("install"):
                self._install(attempt, child, Side.CANDIDATE, assignment.candidate, places)
        self._measure_pair(attempt, pair, places, requests)
        now = child.call_record("state", None, dict[str, str], deadline=attempt.deadline)
        attempt.changed_while_installed += changed_while_installed(pair_child.fingerprint, now)
        if assignment.pairing is not Pairing.ALTERNATING:
            attempt.disturbed = self._disturbance(attempt, child, child)

    def _install(
        self, attempt: Attempt, child: Child, side: Side, candidate: Candidate, places: Sequence[Place]
    ) -> None:
        attempt.reloads.append(self._installer.install(child, side, candidate, places, attempt.deadline))

    def _exchange(self, attempt: Attempt, child: Child, places: Sequence[Place]) -> _Exchange:
        return _Exchange(self._installer, attempt, child, tuple(places))

    def _measure_pair(
        self, attempt: Attempt, pair: Pair, places: Sequence[Place], requests: Sequence[ReplayRequest]
    ) -> None:
        rounds = Rounds(pair, self._plan(attempt, places), attempt.evidence, self._rng(attempt, "order"))
        with attempt.phase("measure"):
            if attempt.assignment.tier is Tier.FAST:
                rounds.until_decided(attempt.assignment.stopping, attempt.deadline)
            else:
                rounds.check_once(attempt.deadline)
                self._replay_rounds(attempt, pair, requests)

    def _plan(self, attempt: Attempt, places: Sequence[Place]) -> Plan:
        assignment = attempt.assignment
        source = self._stable.recipe.sources(assignment.seed, assignment.purpose is Purpose.COLD)
        loaded = assignment.incumbent == AS_LOADED
        rng = self._rng(attempt, "pool")
        plan = self._stable.plan(places, source, rng, pool=attempt.pool, incumbent_is_loaded=loaded)
        return replace(plan, alone_seconds=attempt.alone)

    def _replay_rounds(self, attempt: Attempt, pair: Pair, requests: Sequence[ReplayRequest]) -> None:
        """ABBA of replays of the same requests until the test stops or another block would pass the deadline."""
        assignment, rng = attempt.assignment, self._rng(attempt, "replays")
        chosen = self._chosen(assignment, requests)
        served: list[Mapping[int, Sequence[int]]] = []
        test, longest = SequentialTest(assignment.stopping), 0.0
        while test.decision() is None:
            start = time.monotonic()
            if test.values and start + 1.2 * longest > attempt.deadline:
                break
            order = rng.choice(("ABBA", "BAAB"))
            block = self._replay_block(attempt, pair, chosen, len(test.values), order, served)
            attempt.replays.append(block)
            test.add(block.log_ratio)
            longest = max(longest, time.monotonic() - start)
        if served:
            attempt.tokens = check_served(self._stable, self._whole_cut, chosen, served, self._rng(attempt, "served"))

    def _replay_block(
        self,
        attempt: Attempt,
        pair: Pair,
        requests: Sequence[ReplayRequest],
        index: int,
        order: str,
        served: list[Mapping[int, Sequence[int]]],
    ) -> MeasuredReplay:
        """Four replays. What the candidate served is added to `served`."""
        taken: dict[Side, list[Replay]] = {Side.INCUMBENT: [], Side.CANDIDATE: []}
        for letter in order:
            side = Side.INCUMBENT if letter == "A" else Side.CANDIDATE
            child, name = pair.place(side)
            start = time.monotonic()
            try:
                replay = run_replay(child, name, requests, self._concurrency, attempt.deadline)
            except CandidateFailed as error:
                if side is Side.CANDIDATE or not attempt.alone:
                    raise
                raise waited_for(
                    error, "a replay", time.monotonic() - start, self._alone_replay(attempt, requests)
                ) from None
            taken[side].append(replay)
            if side is Side.CANDIDATE:
                attempt.evidence.activation.update(replay.activation)
                served.append(replay.tokens)
        a, b = taken[Side.INCUMBENT], taken[Side.CANDIDATE]
        return MeasuredReplay(
            round_index=index, order=order, incumbent=(a[0].stats, a[1].stats), candidate=(b[0].stats, b[1].stats)
        )

    def _alone_replay(self, attempt: Attempt, requests: Sequence[ReplayRequest]) -> float:
        """Seconds that a replay of the incumbent beside itself would take, by its windows."""
        shares = {place: self._stable.recipe.rows[place[1]].steps_share for place in attempt.alone}
        step = sum(share * attempt.alone[place] for place, share in shares.items()) / sum(shares.values())
        return sum(item.output_tokens for item in requests) / self._tokens_per_step * step

    def _chosen(self, assignment: Assignment, requests: Sequence[ReplayRequest]) -> Sequence[ReplayRequest]:
        if assignment.replay_requests:
            return requests[: assignment.replay_requests]
        seconds = min(REPLAY_TOKENS_SECONDS, assignment.deadline_seconds / (6 * assignment.stopping.min_rounds))
        return requests_for(requests, seconds * self._loaded_tokens_per_second(), self._concurrency)

    def _loaded_tokens_per_second(self) -> float:
        """Of as loaded over the whole model's rows, from the pair child's A/A; 50 where there is none."""
        known = self._stable.pair().beside_itself
        rows = self._stable.recipe.rows
        times = [known.get((AS_LOADED.id, (self._whole_cut, row))) for row in range(len(rows))]
        seconds = sum(row.steps_share * statistics.median(time) for row, time in zip(rows, times, strict=True) if time)
        return self._tokens_per_step / seconds if seconds else 50.0

    def _incumbent_alone(self, attempt: Attempt, pair_child: PairChild, places: Sequence[Place]) -> None:
        """Its time without the candidate, now: what its time beside the candidate is held against. Of a row whose windows are long
        and decide little, what is known of it will do."""
        incumbent = attempt.assignment.incumbent
        known = {place: pair_child.beside_itself.setdefault((incumbent.id, place), deque(maxlen=8)) for place in places}
        now = [place for place in places if place[1] not in self._stable.brief_rows or not known[place]]
        for place, seconds in self._alone_seconds(attempt, pair_child.child, now, "alone").items():
            known[place].extend(seconds)
            attempt.alone[place] = statistics.median(seconds)
        for place, recent in known.items():
            attempt.alone[place] = max(attempt.alone.get(place, 0.0), statistics.median(recent))
            attempt.before[place] = list(recent)

    def _alone_seconds(
        self, attempt: Attempt, child: Child, places: Sequence[Place], purpose: str
    ) -> dict[Place, list[float]]:
        """Place → seconds a step of the incumbent's windows, nothing beside it."""
        kv = self._stable.kv
        cold = attempt.assignment.purpose is Purpose.COLD
        source = self._stable.recipe.sources(seed_of(attempt.assignment.seed, purpose), cold)
        taken: dict[Place, list[float]] = {}
        for place in places:
            for _ in range(ALONE_WINDOWS):
                tokens = window_tokens(source, kv, place[1])
                window = run_window(
                    child,
                    Side.INCUMBENT,
                    *place,
                    tokens,
                    plan=kv,
                    vocab=self._vocab,
                    deadline=attempt.deadline,
                )
                taken.setdefault(place, []).append(window.seconds / len(tokens))
        return taken

    def _disturbance(self, attempt: Attempt, incumbents: Child, candidates: Child) -> float:
        """The incumbent's weighted time beside the candidate over that alone, before and after: the slower of the two.

        A machine that became slower in the middle is slow afterwards too, and nobody's fault; a candidate that disturbs does so while
        it is installed. What it leaves running is found by the clean proof. The second look costs nothing where the first is clear.
        """
        beside = attempt.evidence.incumbent_seconds
        attempt.disturbed_support = share_slower(beside, attempt.before)
        ratio = self._beside_over(attempt, attempt.alone)
        if ratio <= SECOND_LOOK or attempt.deadline - time.monotonic() < self._second_look_seconds(attempt):
            return ratio
        with attempt.phase("alone"):
            self._installer.uninstall(candidates, Side.CANDIDATE, attempt.deadline)
            after = self._alone_seconds(attempt, incumbents, AFTER_WINDOWS * list(attempt.alone), "alone after")
        attempt.disturbed_support = min(attempt.disturbed_support, share_slower(beside, after))
        slower = {place: max(before, statistics.median(after[place])) for place, before in attempt.alone.items()}
        return self._beside_over(attempt, slower)

    def _second_look_seconds(self, attempt: Attempt) -> float:
        """Twice what the windows alone would take."""
        steps = self._stable.kv.steps_per_window
        return 2 * sum(
            AFTER_WINDOWS * ALONE_WINDOWS * steps[place[1]] * seconds for place, seconds in attempt.alone.items()
        )

    def _beside_over(self, attempt: Attempt, alone: Mapping[Place, float]) -> float:
        """Weighted over the rows that were measured; 1 where none was."""
        beside = itself = 0.0
        for place, seconds in attempt.evidence.incumbent_seconds.items():
            share = self._stable.recipe.rows[place[1]].steps_share
            beside += share * statistics.median(seconds)
            itself += share * alone[place]
        return beside / itself if itself else 1.0

    def _restore(self, attempt: Attempt, pair_child: PairChild) -> None:
        """Both sides as loaded, then the proof; without it the child is replaced."""
        if not pair_child.child.alive:
            self._stable.discard_pair()
            attempt.clean = CleanReport(clean=False, reasons=("the child died",), child_replaced=True)
            return
        deadline = time.monotonic() + CLEAN_SECONDS
        reasons: list[str] = []
        try:
            with attempt.phase("restore"):
                for side in (Side.CANDIDATE, Side.INCUMBENT):
                    self._installer.uninstall(pair_child.child, side, deadline)
            with attempt.phase("clean"):
                now = pair_child.child.call_record("fingerprint", None, Fingerprint, deadline=deadline)
                reasons += differences(pair_child.fingerprint, now)
                if weights_moved(self._stable, pair_child):
                    attempt.weights_unchanged = False
                    reasons.append("the weights' mapping changed")
        except CandidateFailed as error:
            reasons.append(f"{error.failure.kind}: {error.failure.message}")
        reasons += attempt.changed_while_installed
        changed = sorted(set(attempt.evidence.incumbent_changed))
        reasons += [f"the incumbent's answers changed on {row}" for row in changed]
        if reasons:
            self._stable.discard_pair()
        attempt.clean = CleanReport(clean=not reasons, reasons=tuple(reasons), child_replaced=bool(reasons))

    def _places(self, attempt: Attempt) -> list[Place]:
        """Rows of the assignment in the plan, on the cuts of its tier."""
        cuts = self._fast_cuts if attempt.assignment.tier is Tier.FAST else (self._whole_cut,)
        known = {row.key: index for index, row in enumerate(self._stable.recipe.rows)}
        return [(cut, known[row.key]) for cut in cuts for row in attempt.assignment.rows]

    def _rng(self, attempt: Attempt, use: str) -> random.Random:
        return random.Random(seed_of(attempt.assignment.seed, attempt.assignment.candidate.id, use))

    @property
    def _vocab(self) -> int:
        return self._stable.recipe.model.vocab_size

    def _result(self, attempt: Attempt) -> MeasureResult:
        claimed = {slot: 0 for report in attempt.reloads if report.side is Side.CANDIDATE for slot in report.slots}
        if attempt.evidence.first_result_ms is not None:
            attempt.phases_ms["first result"] = attempt.evidence.first_result_ms
        attempt.phases_ms["total"] = (time.monotonic() - attempt.started) * 1e3
        return MeasureResult(
            assignment=attempt.assignment,
            engine=self._name,
            epoch=self._stable.weights.sha256,
            environment=self._environment,
            blocks=tuple(attempt.evidence.blocks),
            replays=tuple(attempt.replays),
            checks=merged(attempt.evidence.checks),
            tokens=attempt.tokens,
            activation={**claimed, **attempt.evidence.activation},
            reloads=tuple(attempt.reloads),
            clean=attempt.clean,
            incumbent_disturbed=attempt.disturbed,
            disturbed_support=attempt.disturbed_support,
            noise_floor=attempt.noise_floor,
            weights_unchanged=attempt.weights_unchanged,
            phases_ms=attempt.phases_ms,
            failure=attempt.failure,
        )


@dataclass(slots=True)
class _Exchange:
    """Puts one side's candidate into the child's `candidate` place, for the alternating pairing."""

    installer: Installer
    attempt: Attempt
    child: Child
    places: tuple[Place, ...]
    reported: set[Side] = field(default_factory=set)

    def __call__(self, side: Side) -> None:
        assignment = self.attempt.assignment
        candidate = assignment.incumbent if side is Side.INCUMBENT else assignment.candidate
        self.installer.uninstall(self.child, Side.CANDIDATE, self.attempt.deadline)
        report = self.installer.install(self.child, Side.CANDIDATE, candidate, self.places, self.attempt.deadline)
        if side not in self.reported:
            self.reported.add(side)
            self.attempt.reloads.append(report)
