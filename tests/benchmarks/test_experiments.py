"""What *decided* means, the list of candidates, and how arms are put together: no engine is started."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from benchmarks.bench_experiments import Progress, _audit, _sign_held, rates_of_a
from benchmarks.experiments.candidates import Proposed, for_vllm, forty
from benchmarks.experiments.deciding import (
    BOUND,
    Judged,
    Outcome,
    decided_per_hour,
    least_starts,
    outcome_of,
    outcome_of_interval,
    projected_starts,
    rounds_needed,
    spread_of_starts,
    starts_needed,
    unpaired_interval,
)
from benchmarks.experiments.paired import Session, hotpass_arm
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict
from hotpass.stats import confidence_radius


def test_forty_proposals_of_which_two_were_made_before() -> None:
    proposals = forty("float32")
    counts = Counter(item.candidate.id for item in proposals)
    assert len(proposals) == 40
    assert sorted(counts.values())[-3:] == [1, 2, 2]
    assert [item.name for item in proposals] == [item.name for item in forty("float32")]


def test_counterparts_are_parts_of_vllms_tree() -> None:
    for item in for_vllm():
        declared = declaration(item.candidate.parts[0].source)
        assert declared.engine == "vllm"
    assert len({item.candidate.id for item in for_vllm()}) == 3


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.01, 0.03, Outcome.FASTER),
        (0.30, 0.40, Outcome.UNDECIDED),
        (-0.01, 0.02, Outcome.EQUAL),
        (-0.019, -0.001, Outcome.SLOWER),
        (-0.9, -0.021, Outcome.SLOWER),
        (-0.9, -0.019, Outcome.UNDECIDED),
        (-math.inf, math.inf, Outcome.UNDECIDED),
    ],
)
def test_an_interval_decides_when_it_is_narrow_or_lies_beyond_the_bound(
    low: float, high: float, outcome: Outcome
) -> None:
    assert outcome_of_interval(low, high) is outcome


def attempt(verdict: Verdict, reason: str = "", speedup: Estimate | None = None) -> Attempt:
    return Attempt(
        candidate_id="c",
        incumbent_id="i",
        tier=Tier.FAST,
        purpose=Purpose.SEARCH,
        verdict=verdict,
        reason=reason,
        speedup=speedup,
        tokens_per_second=None,
    )


def test_what_is_not_timed_is_counted_by_its_reason() -> None:
    assert outcome_of(attempt(Verdict.FAILED, "build: no such header")) is Outcome.BUILD_FAILED
    assert outcome_of(attempt(Verdict.FAILED, "crash: SIGSEGV")) is Outcome.FAILED
    assert outcome_of(attempt(Verdict.INCORRECT, "off by 3")) is Outcome.INCORRECT
    assert outcome_of(attempt(Verdict.INVALID, "never ran")) is Outcome.INVALID
    wide = Estimate(value=2.0, low=1.0, high=4.0)
    assert outcome_of(attempt(Verdict.FASTER, speedup=wide)) is Outcome.UNDECIDED


def test_a_promotion_asks_for_the_rounds_that_make_the_interval_narrow() -> None:
    alpha, sigma = 0.02, 0.02
    radius = confidence_radius(6, sigma, alpha)
    needed = rounds_needed(0.5 - radius, 0.5 + radius, 6, alpha)
    assert needed is not None
    assert confidence_radius(needed, sigma, alpha) * 1.2 <= BOUND < confidence_radius(needed - 1, sigma, alpha) * 1.2
    assert rounds_needed(0.0, 9.0, 6, alpha) is None


def test_starts_are_the_units_of_the_unpaired_arm() -> None:
    low, high = unpaired_interval([0.00, 0.01], [-0.50, -0.49])
    assert low < 0.5 < high
    assert high - low > 4 * BOUND, "two starts of each know little"
    assert unpaired_interval([0.0], [1.0]) == (-math.inf, math.inf)
    narrower = unpaired_interval([0.00, 0.01] * 3, [-0.50, -0.49] * 3)
    assert narrower[1] - narrower[0] < (high - low) / 3


def test_the_rate_counts_decided_ones_over_all_time() -> None:
    found = [
        Judged(name="a", candidate_id="a", outcome=Outcome.FASTER, seconds=5.0),
        Judged(name="b", candidate_id="b", outcome=Outcome.INCORRECT, seconds=5.0),
        Judged(name="c", candidate_id="c", outcome=Outcome.SLOWER, seconds=5.0),
    ]
    assert decided_per_hour(found, 20.0) == 2 * 180.0


@pytest.mark.parametrize(
    ("sign", "interval", "held"),
    [
        (1, (-0.01, 0.02, 0.05), True),
        (1, (-0.05, -0.02, 0.01), False),
        (-1, (-0.05, -0.02, 0.01), True),
        (0, (0.01, 0.03, 0.05), True),
        (0, (0.03, 0.05, 0.07), False),
    ],
)
def test_a_sign_is_kept_when_the_cold_mean_is_on_its_side(
    sign: int, interval: tuple[float, float, float], held: bool
) -> None:
    assert _sign_held(sign, *interval) is held


class Scripted:
    """A session that answers from a table: name → interval."""

    def __init__(self, answers: dict[str, tuple[float, float]]) -> None:
        self.answers = answers

    def decide(self, proposed: Proposed) -> Judged:
        low, high = self.answers[proposed.name]
        return Judged(
            name=proposed.name,
            candidate_id=proposed.candidate.id,
            outcome=outcome_of_interval(low, high),
            seconds=1.0,
            low=low,
            high=high,
        )


def test_each_is_held_against_the_best_so_far() -> None:
    proposals = [Proposed(name=str(n), candidate=Candidate(settings={"threads": n})) for n in range(1, 5)]
    scripted = Scripted({"1": (-0.9, -0.1), "2": (0.5, 0.9), "3": (-0.01, 0.01), "4": (0.01, 0.02)})
    posed, found = hotpass_arm(cast("Session", scripted), [*proposals, proposals[1]], lambda _: None)
    second = proposals[1].candidate
    assert [item.against for item in posed] == [AS_LOADED, AS_LOADED, second, second, proposals[3].candidate]
    assert [item.outcome.value for item in found] == ["slower", "undecided", "equal", "faster", "duplicate"]
    assert [item.is_narrow for item in found] == [False, False, True, True, False]


def judged_as(outcome: Outcome, value: float | None = None) -> Judged:
    return Judged(name="x", candidate_id="x", outcome=outcome, seconds=1.0, value=value)


def test_cold_starts_of_the_list_follow_from_effects_and_the_spread_between_starts() -> None:
    assert spread_of_starts([[0.0, 0.2], [1.0, 1.2]]) == pytest.approx(math.sqrt(0.02))
    assert spread_of_starts([[1.0], [2.0]]) is None
    far, near = starts_needed(-1.6, 0.06), starts_needed(-0.03, 0.06)
    assert far == 2
    assert near == starts_needed(0.0, 0.06)
    radius = 2.457 * 0.06 * math.sqrt(2 / near)
    assert radius <= BOUND < 2.457 * 0.06 * math.sqrt(2 / (near - 1))
    listed = [judged_as(Outcome.SLOWER, -1.6), judged_as(Outcome.EQUAL, 0.0), judged_as(Outcome.INCORRECT)]
    assert projected_starts(listed, 0.06) == far + near + near + 1, "as loaded has as many as the longest"
    assert projected_starts([judged_as(Outcome.DUPLICATE), judged_as(Outcome.BUILD_FAILED)], 0.06) == 0


def test_arm_a_is_never_said_to_be_slower_than_its_own_starts_allow() -> None:
    listed = [judged_as(Outcome.SLOWER, -1.6), judged_as(Outcome.EQUAL, 0.0)]
    rates = rates_of_a(listed, [[0.0, 0.1], [0.0, 0.1]], [40.0, 40.0, 41.0])
    assert rates["at_most"] == pytest.approx(2 / (6 * 40.0) * 3600)
    assert rates["projected"] is not None
    assert rates["projected"] < rates["at_most"]
    assert rates_of_a(listed, [[]], []) == {}
    many = [*listed, judged_as(Outcome.INCORRECT), judged_as(Outcome.FAILED), judged_as(Outcome.UNDECIDED)]
    for sigma in (1e-6, 0.01, 0.1):
        assert least_starts(many) <= projected_starts(many, sigma), "the most that two starts each allow is the most"


class Colder:
    """A session whose cold measurements are timed for all but one."""

    def again_cold(self, proposed: Proposed, seed: int) -> Judged:
        timed = seed != 9001
        return Judged(
            name=proposed.name,
            candidate_id=proposed.candidate.id,
            outcome=Outcome.SLOWER if timed else Outcome.INVALID,
            seconds=1.0,
            low=-0.2 if timed else None,
            value=-0.1 if timed else None,
            high=-0.05 if timed else None,
        )


def test_judgements_are_made_again_until_as_many_were_timed_as_asked(tmp_path: Path) -> None:
    proposals = [Proposed(name=str(n), candidate=Candidate(settings={"threads": n})) for n in range(1, 7)]
    found = [judged_as(Outcome.SLOWER, -0.1)] * 6
    progress = Progress(out=tmp_path / "out.json")
    assert _audit(cast("Session", Colder()), proposals, found, 4, progress) == [True] * 4
    assert progress.known["signs"] == {"kept": 4, "of": 4, "not_timed": 1}
