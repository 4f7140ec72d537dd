"""Rounds: one block on every shape row of every cut, until the sequential test has seen enough.

    round ─► for each cut, row: coin ─► four windows ─► MeasuredBlock, OutputChecks ─► log ratio of weighted sums ─► test

The order of each block is a coin's; the order of sides within it (ABBA, BAAB) cancels a linear drift. A row whose windows are long for
what they decide has two a round (AB, BA), whose drift the coins cancel over rounds; so the time goes where the noise is. The first rounds of
a search are like that on every row: most candidates are far behind, and half the windows say so. Rows with long windows come last in its
rounds, and not at all where the others say in the first that it cannot be made up for: what is tested then is the most that the log ratio
may be. Times are steps' means over a window.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.judge.checks import check_outputs
from engines.judge.disturbance import patience_seconds, waited_for
from engines.judge.inputs import Drawer, InputSet
from engines.judge.pairing import Pair
from engines.judge.windows import Window, answer_from_kv
from engines.program import CandidateFailed, KvPlan
from hotpass.records.measurement import Failure, FailureKind, MeasuredBlock, OutputCheck, Side, Stopping
from hotpass.stats import SequentialTest, weighted_round

ORDERS = ("ABBA", "BAAB")
BRIEF_ORDERS = ("AB", "BA")
BRIEF_ROUNDS = 3
"""Of a search: as many as the least that have an interval. Their spread is larger by a root of two, which the sequential test bears: its
error rate stays below the stated one (simulated in the tests of `hotpass.stats`)."""
SIDES = {"A": Side.INCUMBENT, "B": Side.CANDIDATE}

Place = tuple[int, int]
"""(cut, row of the plan)"""


@dataclass(kw_only=True, slots=True)
class Evidence:
    """What rounds add up to; kept by the caller, so that a failure in the middle loses nothing."""

    blocks: list[MeasuredBlock] = field(default_factory=list)
    checks: list[OutputCheck] = field(default_factory=list)
    activation: Counter[str] = field(default_factory=Counter)
    incumbent_seconds: dict[Place, list[float]] = field(default_factory=dict)
    """Time of a step of the incumbent in each of its windows."""
    candidate_seconds: dict[Place, list[float]] = field(default_factory=dict)
    """The same of the candidate."""
    first_result_ms: float | None = None
    """The candidate's first window; None before it."""
    incumbent_lost_seconds: float = 0.0
    """By how much its windows were longer beside the candidate than beside itself, together."""
    at_most: list[float] = field(default_factory=list)
    """For each round the speedup if late rows had cost the candidate nothing, where they are not measured for what the others said."""
    incumbent_changed: list[str] = field(default_factory=list)
    """Rows on which the deployment as loaded, as the incumbent, no longer answered as at birth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure."""

    kv: KvPlan
    depths: Mapping[int, int]
    """Cut → layers of it."""
    places: Sequence[Place]
    drawers: Mapping[Place, Drawer]
    noise_abs: float
    incumbent_is_loaded: bool
    """True when the incumbent is the deployment as loaded, whose answers to pool sets are known bit for bit."""
    brief_rows: Collection[int] = ()
    """Rows that have a window a side and round instead of two."""
    brief_rounds: int = 0
    """So many rounds, the first, have a window a side on every row."""
    late_rows: Collection[int] = ()
    """Rows that come last in a round; not every side is warm on them."""
    far_behind: float = math.inf
    """As in `Stopping`, of late rows."""
    alone_seconds: Mapping[Place, float] = field(default_factory=dict)
    """A step of the incumbent beside itself; its windows are waited for until the deadline where that is not known."""
    slowed: Callable[[], Sequence[str]] = tuple
    """Asked after each round: what slowed the machine down in it, so that it is to be measured again. Nothing by default."""


LEAST_LOOKS = 2
"""Windows a row of what is measured without its late rows: enough logits for a verdict on them."""

ROOM = 2.5
"""Rounds that must fit before the deadline for another to begin: that one, and the checks that follow the last."""


MAX_SLOWED = 3
"""Rounds in a row on a machine that slows itself down, after which this is not the time to measure (FAILURES E3)."""


class Rounds:
    """Measures rounds of a pair into an Evidence."""

    def __init__(self, pair: Pair, plan: Plan, evidence: Evidence, rng: random.Random) -> None:
        self._pair, self._plan, self._evidence, self._rng = pair, plan, evidence, rng
        self._last: dict[Place, InputSet] = {}
        """What the candidate answered last."""
        self._first = [place for place in plan.places if place[1] not in plan.late_rows]
        self._late = [place for place in plan.places if place[1] in plan.late_rows]

    def until_decided(self, stopping: Stopping, deadline: float, *, look_again: bool = True) -> SequentialTest:
        """Rounds until the test stops, or until another round would pass the deadline. Raises CandidateFailed.

        `look_again`: compare also as many windows as brief rounds left out, which takes as long again.
        """
        test = SequentialTest(stopping)
        longest = 0.0
        while test.decision() is None:
            start = time.monotonic()
            if test.values and start + ROOM * longest > deadline:
                break
            test.add(self._steady_round(len(test.values), deadline))
            longest = max(longest, time.monotonic() - start)
        if look_again:
            self._check_more(self._looks_left(test), deadline - ROOM * longest, deadline)
        self.finish_checks(deadline)
        return test

    def _looks_left(self, test: SequentialTest) -> int:
        """Windows a row that are to be compared beside those that were timed."""
        rounds = len(test.values)
        if self._evidence.at_most:
            return max(0, LEAST_LOOKS - rounds)
        return 0 if test.decision() == "slower" else min(self._plan.brief_rounds, rounds)

    def _check_more(self, windows: int, until: float, deadline: float) -> None:
        """The windows that brief rounds left out, compared and not kept as times: what is not slower is looked at as closely as ever,
        and of what is given up after a round enough is seen to say that it was right."""
        for _ in range(windows):
            if time.monotonic() > until:  # what is measured is not to be lost for a closer look
                return
            for place in self._measured_places():
                if place[1] not in self._plan.brief_rows:
                    self._window(Side.CANDIDATE, place, deadline)

    def round(self, index: int, deadline: float) -> float:
        """One block on every place; the log ratio of the deployment-weighted sums. Without late rows where the first round has left them
        out: the most that it may be."""
        blocks = [self.block(place, index, deadline) for place in self._first]
        self._evidence.blocks += blocks
        bound = self._bound(blocks)
        if self._evidence.at_most or (index == 0 and bound < -self._plan.far_behind):
            self._evidence.at_most.append(math.exp(bound))
            return bound
        if index == 0:
            self._warm_late(deadline)
        late = [self.block(place, index, deadline) for place in self._late]
        self._evidence.blocks += late
        return weighted_round([*blocks, *late])

    def _bound(self, blocks: Sequence[MeasuredBlock]) -> float:
        """Log ratio of the sums if late rows cost the candidate nothing, and the incumbent what they do beside itself."""
        rows, alone = self._plan.kv.rows, self._plan.alone_seconds
        if not self._late or any(place not in alone for place in self._late):
            return math.inf
        late_ms = sum(rows[place[1]].steps_share * alone[place] * 1e3 for place in self._late)
        incumbent_ms = sum(block.row.steps_share * block.incumbent_step_ms for block in blocks)
        return math.log((incumbent_ms + late_ms) / sum(b.row.steps_share * b.candidate_step_ms for b in blocks))

    def _warm_late(self, deadline: float) -> None:
        """A window a side that is compared and not kept as a time: nothing has run there since the installs, so that code may be compiled in
        it, for which the incumbent is not blamed."""
        for place in self._late:
            inputs = self._plan.drawers[place].for_incumbent()
            window = self._pair.window(Side.INCUMBENT, *place, inputs.tokens, deadline)
            self._check_incumbent(place[1], inputs, window.logits)
            self._window(Side.CANDIDATE, place, deadline)

    def _measured_places(self) -> Sequence[Place]:
        return self._first if self._evidence.at_most else self._plan.places

    def _steady_round(self, index: int, deadline: float) -> float:
        """A round in which nothing slowed the machine down. Raises CandidateFailed (disturbed) when there is none."""
        blocks, bounds = len(self._evidence.blocks), len(self._evidence.at_most)
        for _ in range(MAX_SLOWED):
            ratio = self.round(index, deadline)
            reasons = self._plan.slowed()
            if not reasons:
                return ratio
            del self._evidence.blocks[blocks:], self._evidence.at_most[bounds:]
        message = f"not measurable now: {', '.join(reasons)} in {MAX_SLOWED} rounds in a row"
        raise CandidateFailed(Failure(kind=FailureKind.DISTURBED, message=message))

    def block(self, place: Place, index: int, deadline: float) -> MeasuredBlock:
        """Windows of both sides on one row of one cut."""
        cut, row = place
        brief = row in self._plan.brief_rows or index < self._plan.brief_rounds
        order = self._rng.choice(BRIEF_ORDERS if brief else ORDERS)
        taken: dict[Side, list[Window]] = {Side.INCUMBENT: [], Side.CANDIDATE: []}
        for letter in order:
            taken[SIDES[letter]].append(self._window(SIDES[letter], place, deadline))
        steps = self._plan.kv.steps_per_window[row]
        a, b = taken[Side.INCUMBENT], taken[Side.CANDIDATE]
        ratios = [min((window.clock_ratio for window in windows), key=_off) for windows in (a, b)]
        for windows, seconds in ((a, self._evidence.incumbent_seconds), (b, self._evidence.candidate_seconds)):
            seconds.setdefault(place, []).extend(window.seconds / steps for window in windows)
        return MeasuredBlock(
            row=self._plan.kv.rows[row],
            round_index=index,
            order=order,
            incumbent_ms=tuple(window.seconds / steps * 1e3 for window in a),
            candidate_ms=tuple(window.seconds / steps * 1e3 for window in b),
            steps_per_window=steps,
            child_clock_ratio=max(ratios, key=_off),
            layers=self._plan.depths[cut],
            incumbent_clock_ratio=ratios[0],
        )

    def check_once(self, deadline: float) -> None:
        """Two windows of the candidate on each place, compared and not kept as times: for tiers that time something else."""
        for place in self._plan.places:
            for _ in range(2):
                self._window(Side.CANDIDATE, place, deadline)
        self.finish_checks(deadline)

    def finish_checks(self, deadline: float) -> None:
        """Let as loaded go on from the candidate's KV, and the incumbent answer the sets that only the candidate has, so that every
        window is compared."""
        for place in self._measured_places() if self._plan.kv.keeps_kv else ():
            self._check_kv(place, deadline)
        for place in self._plan.places:
            while self._plan.drawers[place].answered:
                self._window(Side.INCUMBENT, place, deadline)

    def _window(self, side: Side, place: Place, deadline: float) -> Window:
        cut, row = place
        drawer = self._plan.drawers[place]
        inputs = drawer.for_candidate() if side is Side.CANDIDATE else drawer.for_incumbent()
        run = self._pair.window if side is Side.CANDIDATE else self._incumbents_window
        window = run(side, cut, row, inputs.tokens, deadline)
        if side is Side.CANDIDATE:
            if self._evidence.first_result_ms is None:
                self._evidence.first_result_ms = window.seconds * 1e3
            self._evidence.activation.update(window.activation)
            self._check_candidate(row, inputs, window.logits)
            inputs.candidate = window.logits
            self._last[place] = inputs
            drawer.answered.append(inputs)
        else:
            self._check_incumbent(row, inputs, window.logits)
        return window

    def _incumbents_window(self, side: Side, cut: int, row: int, tokens: np.ndarray, deadline: float) -> Window:
        """A candidate that starves the incumbent is stopped here, and not by the deadline."""
        alone = self._plan.alone_seconds.get((cut, row), 0.0) * len(tokens)
        if not alone:
            return self._pair.window(side, cut, row, tokens, deadline)
        start = time.monotonic()
        try:
            window = self._pair.window(side, cut, row, tokens, min(deadline, start + patience_seconds(alone)))
        except CandidateFailed as error:
            what = f"a window of {self._plan.kv.rows[row].key}"
            raise waited_for(error, what, time.monotonic() - start, alone) from None
        self._evidence.incumbent_lost_seconds += window.seconds - alone
        return window

    def _check_kv(self, place: Place, deadline: float) -> None:
        """What the candidate's last window left in its cache is what the next reader needs (FAILURES V3)."""
        cut, row = place
        if not self._pair.keeps_both or place not in self._last:
            self._window(Side.CANDIDATE, place, deadline)
        inputs = self._last[place]
        assert inputs.candidate is not None, "noted when it was answered"
        child, name = self._pair.place(Side.CANDIDATE)
        last = inputs.candidate[-1:]
        ends = np.cumsum(self._plan.kv.row_query_lens(row)) - 1
        answer = answer_from_kv(child, name, cut, row, inputs.tokens[-1][ends], last.shape[-1], deadline)
        if answer is not None:
            shape = self._plan.kv.rows[row]
            self._evidence.checks.append(check_outputs(shape, "kv", answer, last, self._plan.noise_abs))

    def _check_candidate(self, row: int, inputs: InputSet, logits: np.ndarray) -> None:
        shape, noise = self._plan.kv.rows[row], self._plan.noise_abs
        if inputs.reference is not None:
            self._evidence.checks.append(check_outputs(shape, "reference", logits, inputs.reference, noise))
        if inputs.loaded is not None and not self._plan.incumbent_is_loaded:
            self._evidence.checks.append(check_outputs(shape, "loaded", logits, inputs.loaded, noise))

    def _check_incumbent(self, row: int, inputs: InputSet, logits: np.ndarray) -> None:
        shape = self._plan.kv.rows[row]
        if inputs.candidate is not None:
            check = check_outputs(shape, "incumbent", inputs.candidate, logits, self._plan.noise_abs)
            self._evidence.checks.append(check)
        known = self._plan.incumbent_is_loaded and inputs.loaded is not None
        if known and not np.array_equal(logits.view(np.int32), inputs.loaded.view(np.int32)):  # type: ignore[union-attr]
            self._evidence.incumbent_changed.append(shape.key)


def _off(clock_ratio: float) -> float:
    """How far from 1, in either direction."""
    return abs(math.log(max(clock_ratio, 1e-9)))
