"""One assignment, from install to clean proof.

    pair child, or a fresh child a side ─► incumbent on ─► incumbent alone ─► candidate on ─► rounds or replays ─► both off ─► clean?

A candidate's fault ends up in the result; the child it happened in is replaced when it is dead or not clean, and the next assignment
finds the engine as this one did. The machine's faults are raised.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engines.client import Child
from engines.judge.checks import merged
from engines.judge.clean import changed_while_installed, differences, weights_moved
from engines.judge.disturbance import Alone, Watcher, behind_a_timeout
from engines.judge.inputs import InputSet, seed_of
from engines.judge.install import Installer
from engines.judge.pairing import Alternating, OwnProcesses, Pair, SideBySide, derived_sizes, pairing_within
from engines.judge.reloads import can_be_proven, prove_reload
from engines.judge.replay_rounds import ReplayRounds
from engines.judge.rounds import BRIEF_ROUNDS, Place, Plan, Rounds
from engines.judge.underway import Attempt
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
    MeasureResult,
    Pairing,
    Purpose,
    Side,
    Tier,
)

CLEAN_SECONDS = 60.0
"""Deadline of restore and proof; a child that needs longer is replaced."""


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
        room_bytes: Callable[[], int],
    ) -> None:
        """`room_bytes`: memory that the derived weights of two sides may take now."""
        self._name, self._stable, self._installer = name, stable, installer
        self._environment = environment
        self._fast_cuts, self._whole_cut = tuple(fast_cuts), whole_cut
        self._audited_share = audited_share
        self._room_bytes = room_bytes
        self._watcher = Watcher(stable, installer)
        self._replays = ReplayRounds(stable, whole_cut, concurrency, output_tokens_per_step)

    def measure(self, assignment: Assignment, requests: Sequence[ReplayRequest] = ()) -> MeasureResult:
        """Measure until the stopping rule is met or the deadline. `requests`: for the slow tier. Raises MachineError only."""
        attempt = Attempt(assignment=assignment, pairing=assignment.pairing, started=time.monotonic())
        if not self._built(attempt):
            return self._result(attempt)
        own = attempt.pairing is Pairing.TWO_ENGINES
        pair_child = None if own and assignment.tier is Tier.FAST else self._stable.pair()
        attempt.started = time.monotonic()  # births are not the candidate's time
        try:
            if pair_child is not None:
                attempt.phases_ms.update(pair_child.birth_ms())
                attempt.noise_floor = pair_child.noise_floor
            if own:
                self._in_own_processes(attempt, requests)
            else:
                assert pair_child is not None
                self._in_one_child(attempt, pair_child, requests)
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
        """Warm equals cold, the incumbent comes back, every layer of the pair child answers as at birth, and every byte of the weights is
        as it was loaded."""
        assignment = attempt.assignment
        with attempt.phase("audit"):
            try:
                proof = prove_reload(self._stable, self._installer, assignment.incumbent, assignment.candidate)
                left = self._differences(self._stable.pair(), time.monotonic() + CLEAN_SECONDS, whole=True)
            except CandidateFailed as error:
                attempt.failure = error.failure
                return
            attempt.weights_unchanged &= self._stable.weights_hold()
        if left:
            self._stable.discard_pair()
        reasons = [*left, *([] if proof.holds else [f"reload: {proof.reason}"])]
        if reasons:
            attempt.clean = CleanReport(clean=False, reasons=tuple(reasons), child_replaced=bool(left))

    def _differences(self, pair_child: PairChild, deadline: float, *, whole: bool) -> list[str]:
        """What the child is not as it was at birth. `whole`: every layer has answered the probe. Raises CandidateFailed."""
        now = pair_child.child.call_record("fingerprint", {"whole": whole}, Fingerprint, deadline=deadline)
        return differences(pair_child.fingerprint, now)

    def _built(self, attempt: Attempt) -> bool:
        """Files of both candidates, off the measuring time: a builder has usually made them before. How large they are may change how
        the sides are paired."""
        assignment, sizes = attempt.assignment, list[dict[Path, int]]()
        try:
            with attempt.phase("build"):
                for candidate in (assignment.incumbent, assignment.candidate):
                    files = self._installer.build(candidate, attempt.deadline)
                    sizes.append(derived_sizes(files, self._cuts(assignment.tier)))
        except CandidateFailed as error:
            attempt.failure = error.failure
            return False
        attempt.pairing = pairing_within(assignment.pairing, sizes[0], sizes[1], self._room_bytes())
        return True

    def _in_own_processes(self, attempt: Attempt, requests: Sequence[ReplayRequest]) -> None:
        """Each side in a fresh child that the other never enters; the weights are the keeper's, which neither can write."""
        places, assignment = self._places(attempt), attempt.assignment
        with contextlib.ExitStack() as children:
            with attempt.phase("fork"), machine_fault("fresh children"):
                a = children.enter_context(self._stable.fresh_child())
                b = children.enter_context(self._stable.fresh_child())
                for name, ms in (*born(a.phases_ms).items(), *born(b.phases_ms).items()):
                    attempt.phases_ms[name] = attempt.phases_ms.get(name, 0.0) + ms
                if assignment.purpose is Purpose.COLD:
                    attempt.pool = self._held_out(a, places, assignment.seed)
            pair = OwnProcesses(a, b, self._stable.kv, self._vocab)
            if assignment.tier is Tier.FAST:
                with attempt.phase("a against a"), machine_fault("A/A of fresh children"):
                    self._a_against_a(attempt, pair, places)
            attempt.started = time.monotonic()
            try:
                with attempt.phase("install"):
                    self._install(attempt, a, Side.INCUMBENT, assignment.incumbent, places)
                if assignment.incumbent != AS_LOADED or not attempt.alone.groups:
                    with attempt.phase("alone"):
                        attempt.alone = Alone()
                        times = 2 if assignment.tier is Tier.FAST else 1
                        attempt.alone.add(self._watcher.windows(attempt, a, times * places, "alone"))
                with attempt.phase("install"):
                    self._install(attempt, b, Side.CANDIDATE, assignment.candidate, places)
                if attempt.needs_more_than_declared:
                    return
                self._measure_pair(attempt, pair, places, requests)
                attempt.disturbance = self._watcher.measured(attempt, a, b)
            except CandidateFailed as error:
                attempt.failure = self._cause(attempt, error.failure)

    def _a_against_a(self, attempt: Attempt, pair: OwnProcesses, places: Sequence[Place]) -> None:
        """Both children as loaded: the noise floor of two processes, and the incumbent's time beside one that does nothing."""
        for side in Side:
            child, name = pair.place(side)
            self._stable.load_contexts(child, name, places, time.monotonic() + CLEAN_SECONDS)
        patience, cold = self._stable.recipe.aa_seconds / 3, attempt.assignment.purpose is Purpose.COLD
        evidence, attempt.noise_floor = self._stable.a_against_a(pair, places, patience, held_out=cold)
        attempt.alone.add(evidence.incumbent_seconds)

    def _held_out(self, incumbent: Child, places: Sequence[Place], seed: int) -> Mapping[Place, Sequence[InputSet]]:
        """A cold measurement shares no input with any search: sets, and references for them, of its own."""
        sets = self._stable.held_out_sets(places, seed)
        self._stable.load_contexts(incumbent, Side.INCUMBENT, places, time.monotonic() + CLEAN_SECONDS)
        self._stable.note_loaded(incumbent, sets)
        return sets

    def _in_one_child(self, attempt: Attempt, pair_child: PairChild, requests: Sequence[ReplayRequest]) -> None:
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
        alternating = attempt.pairing is Pairing.ALTERNATING
        if alternating:
            exchange = _Exchange(self._installer, attempt, child, tuple(places))
            pair: Pair = Alternating(child, self._stable.kv, self._vocab, exchange)
            with attempt.phase("install"):
                pair.place(Side.CANDIDATE)
        else:
            pair = SideBySide(child, self._stable.kv, self._vocab)
            attempt.late_rows = self._late_rows(assignment)
            if assignment.incumbent != AS_LOADED:
                with attempt.phase("install"):
                    self._install(attempt, child, Side.INCUMBENT, assignment.incumbent, places)
            with attempt.phase("alone"):
                self._watcher.before(attempt, pair_child, places)
            with attempt.phase("install"):
                self._install(attempt, child, Side.CANDIDATE, assignment.candidate, places)
        if attempt.needs_more_than_declared:
            return
        self._measure_pair(attempt, pair, places, requests)
        now = child.call_record("state", None, dict[str, str], deadline=attempt.deadline)
        attempt.changed_while_installed += changed_while_installed(pair_child.fingerprint, now)
        if not alternating:
            attempt.disturbance = self._watcher.measured(attempt, child, child)

    def _install(
        self, attempt: Attempt, child: Child, side: Side, candidate: Candidate, places: Sequence[Place]
    ) -> None:
        report = self._installer.install(child, side, candidate, places, attempt.deadline, attempt.late_rows)
        attempt.reloads.append(report)

    def _measure_pair(
        self, attempt: Attempt, pair: Pair, places: Sequence[Place], requests: Sequence[ReplayRequest]
    ) -> None:
        rounds = Rounds(pair, self._plan(attempt, places), attempt.evidence, self._rng(attempt, "order"))
        with attempt.phase("measure"):
            if attempt.assignment.tier is Tier.FAST:
                # what as loaded answers is known bit for bit: A/A needs no closer look
                look_again = attempt.assignment.purpose is not Purpose.AA
                rounds.until_decided(attempt.assignment.stopping, attempt.deadline, look_again=look_again)
            else:
                rounds.check_once(attempt.deadline)
                order, sample = self._rng(attempt, "replays"), self._rng(attempt, "served")
                self._replays.until_decided(attempt, pair, requests, order, sample)

    def _plan(self, attempt: Attempt, places: Sequence[Place]) -> Plan:
        assignment = attempt.assignment
        source = self._stable.recipe.sources(assignment.seed, assignment.purpose is Purpose.COLD)
        loaded = assignment.incumbent == AS_LOADED
        rng = self._rng(attempt, "pool")
        plan = self._stable.plan(places, source, rng, pool=attempt.pool, incumbent_is_loaded=loaded)
        brief = {Purpose.SEARCH: BRIEF_ROUNDS, Purpose.AA: assignment.stopping.max_rounds}.get(assignment.purpose, 0)
        far_behind = assignment.stopping.far_behind
        return replace(
            plan,
            alone_seconds=attempt.alone.seconds(),
            brief_rounds=brief,
            late_rows=attempt.late_rows,
            far_behind=math.inf if far_behind is None else far_behind,
        )

    def _late_rows(self, assignment: Assignment) -> frozenset[int]:
        may_be_left_out = assignment.stopping.far_behind is not None and assignment.tier is Tier.FAST
        return self._stable.late_rows if may_be_left_out else frozenset()

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
                reasons += self._differences(pair_child, deadline, whole=False)
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
        known = {row.key: index for index, row in enumerate(self._stable.recipe.rows)}
        rows = attempt.assignment.rows
        return [(cut, known[row.key]) for cut in self._cuts(attempt.assignment.tier) for row in rows]

    def _cuts(self, tier: Tier) -> Sequence[int]:
        return self._fast_cuts if tier is Tier.FAST else (self._whole_cut,)

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
            pairing=attempt.pairing,
            blocks=tuple(attempt.evidence.blocks),
            replays=tuple(attempt.replays),
            checks=merged(attempt.evidence.checks),
            tokens=attempt.tokens,
            activation={**claimed, **attempt.evidence.activation},
            reloads=tuple(attempt.reloads),
            clean=attempt.clean,
            incumbent_disturbed=attempt.disturbance.ratio,
            disturbed_low=attempt.disturbance.low,
            noise_floor=attempt.noise_floor,
            at_most=tuple(attempt.evidence.at_most),
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
            self.attempt.reloads.append(replace(report, side=side))
