"""The incumbent beside a candidate against the incumbent beside itself: how much slower it was, and whose time ran out.

    before the candidate   windows of the incumbent, now and lately ─┐
    beside it              its windows of every block ───────────────┼─► ratio of weighted geometric means, with its lower bound
    after it               windows again, where the ratio asks ──────┘

The ratio is made as the speed is (geometric over the windows of a row, weighted over rows), so that whatever share of its windows the
incumbent is slowed in, it counts here by what it adds to the candidate's speedup. What it is worth is `verification`'s to say. A
candidate that starves the incumbent is beyond measuring: the judge gives its window up long before the deadline, and says so.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from engines.judge.inputs import seed_of, window_tokens
from engines.judge.windows import run_window
from engines.program import CandidateFailed
from hotpass.records.measurement import Failure, FailureKind, Purpose, Side
from hotpass.stats import student_quantile

if TYPE_CHECKING:
    from engines.client import Child
    from engines.judge.install import Installer
    from engines.judge.rounds import Evidence, Place
    from engines.judge.underway import Attempt
    from engines.stable import PairChild, Stable

WAIT_FACTOR = 10.0
"""A window of the incumbent is waited for so many times as long as it takes beside itself, and `WAIT_SECONDS` more."""

WAIT_SECONDS = 2.0
"""No hiccup of a machine that can measure at all takes so long."""

BLAMED_SHARE = 0.5
"""Where the incumbent lost more than this share of the time before a missed deadline, it was the disturbance that missed it."""

CONFIDENCE = 0.99
"""One-sided level of the lower bound: of a hundred honest candidates on an unsteady machine one is above it."""

AFTER_WINDOWS = 2
"""Windows of the incumbent on each row after the candidate, where its time beside it needs explaining."""

SECOND_LOOK = 1.03
"""An incumbent slower than this beside the candidate is timed alone once more, after the candidate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """The incumbent's time beside a candidate over its time beside itself."""

    ratio: float = 1.0
    """Of weighted geometric means; 1 where nothing was measured."""
    low: float | None = None
    """What the ratio is at least, by the noise of the windows that no disturbance is in; None where nothing was measured."""


@dataclass(kw_only=True, slots=True)
class Alone:
    """Windows of the incumbent with no candidate beside them, in groups: each was taken at one time."""

    groups: dict[Place, list[tuple[float, ...]]] = field(default_factory=dict)
    """Place → groups of seconds a step."""

    def add(self, taken: Mapping[Place, Sequence[float]]) -> None:
        for place, seconds in taken.items():
            self.groups.setdefault(place, []).append(tuple(seconds))

    def usual(self, place: Place) -> tuple[float, ...]:
        """The slowest group: a machine that was slow before or after the candidate may have been so beside it."""
        return max(self.groups[place], key=geometric_mean)

    def seconds(self) -> dict[Place, float]:
        """Place → seconds a step."""
        return {place: geometric_mean(self.usual(place)) for place in self.groups}


def disturbance(evidence: Evidence, alone: Alone, shares: Mapping[Place, float], noise_floor: float) -> Disturbance:
    """How much slower the incumbent was beside the candidate. `shares`: steps of each place; `noise_floor` as A/A has it.

    The noise is that of windows which a disturbed incumbent has no part in: its own alone, and the candidate's. Windows of the
    candidate may be made unsteady on purpose, but only by making them slower, which costs the candidate what it hides.
    """
    places = [place for place in evidence.incumbent_seconds if place in alone.groups]
    usual = {place: alone.usual(place) for place in places}
    itself = sum(shares[place] * geometric_mean(usual[place]) for place in places)
    if not itself:
        return Disturbance()
    beside = {place: evidence.incumbent_seconds[place] for place in places}
    ratio = sum(shares[place] * geometric_mean(beside[place]) for place in places) / itself
    variance, freedom = _noise(evidence, alone, places)
    error = sum(
        (shares[place] * geometric_mean(usual[place]) / itself) ** 2 * (1 / len(beside[place]) + 1 / len(usual[place]))
        for place in places
    )
    sigma = math.sqrt(max(variance, noise_floor**2) * error)
    return Disturbance(ratio=ratio, low=ratio * math.exp(-student_quantile(CONFIDENCE, max(1, freedom)) * sigma))


def _noise(evidence: Evidence, alone: Alone, places: Sequence[Place]) -> tuple[float, int]:
    """Variance of the log of a window's time, the larger of both sides', and the degrees of freedom behind it."""
    own = [[seconds for group in alone.groups[place] for seconds in group] for place in places]
    others = [evidence.candidate_seconds.get(place, []) for place in places]
    return max(_pooled(own), _pooled(others))


def _pooled(samples: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Variance of logs within samples, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for sample in samples:
        logs = [math.log(seconds) for seconds in sample]
        squares += sum((value - fmean(logs)) ** 2 for value in logs)
        freedom += max(0, len(logs) - 1)
    return (squares / freedom, freedom) if freedom else (0.0, 0)


class Watcher:
    """Times the incumbents of attempts on one engine, with nothing beside them and against what they took beside a candidate."""

    def __init__(self, stable: Stable, installer: Installer) -> None:
        self._stable, self._installer = stable, installer

    def before(self, attempt: Attempt, pair_child: PairChild, places: Sequence[Place]) -> None:
        """The incumbent alone, now and lately. Of a row whose windows are long and decide little, or that may not be measured at all,
        what is known of it will do."""
        incumbent = attempt.assignment.incumbent.id
        known = {place: pair_child.beside_itself.setdefault((incumbent, place), deque(maxlen=8)) for place in places}
        patient = self._stable.brief_rows | attempt.late_rows
        now = [place for place in places if place[1] not in patient or not known[place]]
        cold = [place for place in now if place[1] in attempt.late_rows]
        self.windows(attempt, pair_child.child, cold, "warm-up")
        taken = self.windows(attempt, pair_child.child, now, "alone")
        for place, seconds in taken.items():
            known[place].extend(seconds)
        attempt.alone.add(taken)
        attempt.alone.add(known)

    def windows(
        self, attempt: Attempt, child: Child, places: Sequence[Place], purpose: str
    ) -> dict[Place, list[float]]:
        """Place → seconds a step of a window of the incumbent for each time that the place is named. Raises CandidateFailed."""
        kv, assignment = self._stable.kv, attempt.assignment
        cold = assignment.purpose is Purpose.COLD
        source = self._stable.recipe.sources(seed_of(assignment.seed, purpose), cold)
        vocab = self._stable.recipe.model.vocab_size
        taken: dict[Place, list[float]] = {}
        for place in places:
            tokens = window_tokens(source, kv, place[1])
            window = run_window(child, Side.INCUMBENT, *place, tokens, plan=kv, vocab=vocab, deadline=attempt.deadline)
            taken.setdefault(place, []).append(window.seconds / len(tokens))
        return taken

    def measured(self, attempt: Attempt, incumbents: Child, candidates: Child) -> Disturbance:
        """The incumbent beside the candidate. Where that needs explaining, the candidate is taken off and the incumbent timed again.

        A machine that became slower in the middle is slow afterwards too, and nobody's fault; a candidate that disturbs does so while
        it is installed. What it leaves running is found by the clean proof. Raises CandidateFailed.
        """
        first = self._of(attempt)
        if first.ratio <= SECOND_LOOK or attempt.deadline - time.monotonic() < self._second_look_seconds(attempt):
            return first
        with attempt.phase("alone"):
            self._installer.uninstall(candidates, Side.CANDIDATE, attempt.deadline)
            places = AFTER_WINDOWS * [
                place for place in attempt.alone.groups if place in attempt.evidence.incumbent_seconds
            ]
            attempt.alone.add(self.windows(attempt, incumbents, places, "alone after"))
        return self._of(attempt)

    def _of(self, attempt: Attempt) -> Disturbance:
        rows = self._stable.recipe.rows
        shares = {place: rows[place[1]].steps_share for place in attempt.alone.groups}
        return disturbance(attempt.evidence, attempt.alone, shares, attempt.noise_floor)

    def _second_look_seconds(self, attempt: Attempt) -> float:
        """Twice what the windows alone would take."""
        steps = self._stable.kv.steps_per_window
        seconds = attempt.alone.seconds()
        return 2 * AFTER_WINDOWS * sum(steps[place[1]] * step for place, step in seconds.items())


def patience_seconds(alone_seconds: float) -> float:
    """How long to wait for a window of the incumbent that takes `alone_seconds` beside itself."""
    return WAIT_FACTOR * alone_seconds + WAIT_SECONDS


def of_the_incumbent(failure: Failure, what: str, waited_seconds: float, alone_seconds: float) -> Failure:
    """What it means that the incumbent, beside a candidate, failed after so long a wait: a timeout is a disturbance when the incumbent
    was given far more than its time, and stays a timeout where the deadline left it none."""
    if failure.kind is not FailureKind.TIMEOUT or waited_seconds < WAIT_FACTOR * alone_seconds:
        return failure
    message = f"{what} had not ended after {waited_seconds:.1f} s, beside itself it takes {alone_seconds:.3f} s"
    return Failure(kind=FailureKind.DISTURBED, message=message, detail=failure.detail)


def behind_a_timeout(failure: Failure, lost_seconds: float, elapsed_seconds: float) -> Failure:
    """A timeout of which the time that the incumbent lost is the cause says so."""
    if failure.kind is not FailureKind.TIMEOUT or lost_seconds <= BLAMED_SHARE * elapsed_seconds:
        return failure
    message = f"its windows took {lost_seconds:.1f} s of {elapsed_seconds:.1f} s more than beside itself"
    return Failure(kind=FailureKind.DISTURBED, message=message, detail=failure.detail)


def waited_for(error: CandidateFailed, what: str, waited_seconds: float, alone_seconds: float) -> CandidateFailed:
    """The error to raise instead of one that came out of the incumbent's side."""
    return CandidateFailed(of_the_incumbent(error.failure, what, waited_seconds, alone_seconds))
