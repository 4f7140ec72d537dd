"""Each way of being wrong gives its own verdict; an honest candidate passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hotpass.records.candidate import Numerics, Reload
from hotpass.records.measurement import (
    CleanReport,
    Failure,
    FailureKind,
    MeasuredReplay,
    Purpose,
    ReloadReport,
    ReplayStats,
    Side,
    Stopping,
    Tier,
    Verdict,
)
from hotpass.records.shapes import Phase
from tests.verification.builders import BAND, ROW, TABLE, blocks, check, result
from verification.policy import Policy
from verification.verdict import judge


def judged(measured: Any, policy: Policy | None = None, **changes: Any) -> Any:
    return judge(measured, policy=policy or Policy(), band=BAND, shapes=TABLE, num_layers=2, **changes)


def test_an_honest_speedup_is_faster_with_its_interval_and_rate() -> None:
    attempt = judged(result(2.0))
    assert attempt.verdict is Verdict.FASTER
    assert attempt.speedup.value == pytest.approx(2.0, rel=0.01)
    assert attempt.speedup.low > 1.9
    assert attempt.tokens_per_second == pytest.approx(2.0 / 5e-3, rel=0.01)
    assert attempt.numerics_measured["max_abs"] == 5e-5


def test_slower_and_equal() -> None:
    assert judged(result(0.7)).verdict is Verdict.SLOWER
    equal = judged(result(1.0, blocks=blocks(1.0, rounds=12)))
    assert equal.verdict is Verdict.INCONCLUSIVE
    assert "equal" in equal.reason


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({"failure": Failure(kind=FailureKind.CRASH, message="SIGSEGV")}, Verdict.FAILED, "SIGSEGV"),
        (
            {"failure": Failure(kind=FailureKind.DISTURBED, message="a window had not ended")},
            Verdict.INVALID,
            "incumbent disturbed: a window had not ended",
        ),
        ({"checks": ()}, Verdict.INVALID, "no output"),
        ({"checks": (check(positions=2, argmax_clear=2, argmax_clear_agree=2),)}, Verdict.INVALID, "2 rows"),
        ({"checks": (check(max_abs=0.5),)}, Verdict.INCORRECT, "differ by 0.5"),
        ({"checks": (check(max_abs=float("inf")),)}, Verdict.INCORRECT, "non-finite"),
        ({"checks": (check(kl_mean=float("nan")),)}, Verdict.INCORRECT, "non-finite"),
        ({"checks": (check(worst_row_rms=9e-4),)}, Verdict.INCORRECT, "one row"),
        ({"checks": (check(argmax_clear_agree=15),)}, Verdict.INCORRECT, "clearly decided"),
        ({"checks": (check(), check(against="incumbent", max_abs=0.01))}, Verdict.INCORRECT, "incumbent's by 0.01"),
        ({"checks": (check(), check(against="incumbent", max_abs=float("inf")))}, Verdict.INCORRECT, "non-finite"),
        ({"activation": {"model.layers.0": 4, "model.layers.1": 0}}, Verdict.INVALID, "model.layers.1"),
        ({"activation": {}}, Verdict.INVALID, "never ran"),
        ({"weights_unchanged": False}, Verdict.INVALID, "weights"),
        ({"clean": CleanReport(clean=False, reasons=("threads 2 -> 1",))}, Verdict.INVALID, "threads 2 -> 1"),
        ({"incumbent_disturbed": 1.2}, Verdict.INVALID, "disturbed"),
        ({"blocks": blocks(2.0, child_clock_ratio=0.1)}, Verdict.INVALID, "clocks"),
        ({"blocks": blocks(2.0, child_clock_ratio=1.3)}, Verdict.INVALID, "clocks"),
        ({"blocks": blocks(2.0, child_clock_ratio=0.29, incumbent_clock_ratio=0.6)}, Verdict.INVALID, "clocks"),
        ({"blocks": ()}, Verdict.INVALID, "no whole round"),
    ],
)
def test_each_fault_has_its_verdict_and_reason(changes: dict[str, Any], verdict: Verdict, reason: str) -> None:
    attempt = judged(result(2.0, **changes))
    assert attempt.verdict is verdict
    assert reason in attempt.reason
    assert attempt.speedup is None


KINDS = list(Reload)


@pytest.mark.parametrize("needed", KINDS)
@pytest.mark.parametrize("declared", KINDS)
def test_a_reload_that_is_costlier_than_declared_is_refused(declared: Reload, needed: Reload) -> None:
    report = ReloadReport(candidate_id="c", side=Side.CANDIDATE, declared=declared, actual=needed)
    attempt = judged(result(2.0, reloads=(report,)))
    if KINDS.index(needed) > KINDS.index(declared):
        assert attempt.verdict is Verdict.INVALID
        assert attempt.reason == f"its reload is declared {declared} and needs {needed}"
    else:
        assert attempt.verdict is Verdict.FASTER
    assert judged(result(2.0, reloads=(replace(report, side=Side.INCUMBENT),))).verdict is Verdict.FASTER


def test_below_the_floor_is_suspect() -> None:
    assert judged(result(2.0), floors_ms={ROW.key: 4.5}).verdict is Verdict.FASTER
    attempt = judged(result(20.0), floors_ms={ROW.key: 4.5})
    assert attempt.verdict is Verdict.INVALID
    assert "suspect" in attempt.reason


def test_a_class_wider_than_the_policy_is_refused_however_fast() -> None:
    attempt = judged(result(9.0, numerics=Numerics.LOSSY))
    assert attempt.verdict is Verdict.INVALID
    assert "lossy" in attempt.reason
    assert judged(result(9.0, numerics=Numerics.LOSSY), Policy(numerics=Numerics.LOSSY)).verdict is Verdict.FASTER


def test_lossy_is_judged_by_divergence_and_by_its_worst_row() -> None:
    policy = Policy(numerics=Numerics.LOSSY)
    lossy = {"max_abs": 0.9, "rms": 0.2, "worst_row_rms": 0.3, "kl_mean": 0.004}
    assert judged(result(numerics=Numerics.LOSSY, checks=(check(**lossy),)), policy).verdict is Verdict.FASTER
    undecided = {"argmax_decided": 8, "argmax_decided_agree": 8, "argmax_near": 12}  # of 16, four went to no near tie
    for change in (
        {"kl_mean": 0.5},
        {"worst_row_rms": 1.9},
        {"argmax_decided": 16, "argmax_decided_agree": 12},
        undecided,
    ):
        attempt = judged(result(numerics=Numerics.LOSSY, checks=(check(**{**lossy, **change}),)), policy)
        assert attempt.verdict is Verdict.INCORRECT


def test_bit_identical_means_every_bit_of_the_loaded_baseline() -> None:
    same = check(against="incumbent", bit_equal=True, max_abs=0.0)
    assert judged(result(numerics=Numerics.BIT_IDENTICAL, checks=(same,))).verdict is Verdict.FASTER
    off = replace(same, bit_equal=False, max_abs=1e-7)
    assert judged(result(numerics=Numerics.BIT_IDENTICAL, checks=(same, off))).verdict is Verdict.INCORRECT


def test_two_depths_are_extrapolated_and_say_so() -> None:
    # Depths 2 and 4 of 10 layers: incumbent 2 + 1 ms a layer, candidate 2 + 0.5 ms a layer -> 12 against 7 ms.
    made = []
    for index in range(4):
        for depth in (2, 4):
            for item in blocks(1.0, rounds=1):
                candidate_ms = 2 + 0.5 * depth
                made.append(
                    replace(
                        item,
                        round_index=index,
                        layers=depth,
                        incumbent_ms=(2.0 + depth, 2.0 + depth),
                        candidate_ms=(candidate_ms, candidate_ms),
                    )
                )
    attempt = judge(result(blocks=tuple(made)), policy=Policy(), band=BAND, shapes=TABLE, num_layers=10)
    assert attempt.speedup is not None
    assert attempt.speedup.value == pytest.approx(12 / 7)
    assert attempt.speedup.kind == "predicted"


def test_slow_tier_counts_tokens_per_second_of_replays() -> None:
    def stats(seconds: float) -> ReplayStats:
        return ReplayStats(
            num_requests=2, output_tokens=100, wall_seconds=seconds, ttft_ms=(1.0, 1.0), tpot_ms=(1.0, 1.0), steps=50
        )

    replays = tuple(
        MeasuredReplay(
            round_index=i,
            order="ABBA",
            incumbent=(stats(4.0), stats(4.0)),
            candidate=(stats(2.0 + 0.01 * i), stats(2.0)),
        )
        for i in range(3)
    )
    base = result()
    slow = replace(base, assignment=replace(base.assignment, tier=Tier.SLOW), blocks=(), replays=replays)
    attempt = judged(slow)
    assert attempt.verdict is Verdict.FASTER
    assert attempt.speedup.value == pytest.approx(4.0 / 2.005, rel=1e-3)
    assert attempt.tokens_per_second == pytest.approx(600 / 12.03, rel=1e-3)


@pytest.mark.parametrize(
    ("ratio", "low", "verdict"),
    [
        (1.4, 0.98, Verdict.FASTER),
        (1.4, 1.0, Verdict.FASTER),
        (1.4, 1.01, Verdict.INVALID),
        (1.4, None, Verdict.INVALID),
        (1.04, 1.03, Verdict.FASTER),
    ],
    ids=["noise", "just noise", "beyond noise", "no interval", "within the margin"],
)
def test_a_slow_incumbent_is_a_disturbed_one_where_noise_does_not_explain_it(
    ratio: float, low: float | None, verdict: Verdict
) -> None:
    assert judged(result(2.0, incumbent_disturbed=ratio, disturbed_low=low)).verdict is verdict


def test_on_a_machine_where_messages_wait_both_sides_say_less() -> None:
    waits = blocks(2.0, child_clock_ratio=0.2, incumbent_clock_ratio=0.3)
    assert judged(result(2.0, blocks=waits)).verdict is Verdict.FASTER


def test_lossy_tokens_that_are_a_near_tie_may_differ() -> None:
    policy = Policy(numerics=Numerics.LOSSY)
    near = check(
        max_abs=0.9,
        rms=0.2,
        worst_row_rms=0.3,
        kl_mean=0.004,
        argmax_clear_agree=9,
        argmax_decided=8,
        argmax_decided_agree=8,
        argmax_near=16,
    )
    assert judged(result(numerics=Numerics.LOSSY, checks=(near,)), policy).verdict is Verdict.FASTER


def test_as_loaded_beside_itself_cannot_be_disturbed() -> None:
    base = result(1.0, incumbent_disturbed=1.2, blocks=blocks(1.0, rounds=12))
    own = replace(base, assignment=replace(base.assignment, purpose=Purpose.AA))
    assert judged(own).verdict is Verdict.INCONCLUSIVE
    assert judged(base).verdict is Verdict.INVALID


def test_engine_seconds_are_the_total_not_the_total_and_its_parts() -> None:
    parts = {"install": 500.0, "measure": 1500.0}
    assert judged(result(2.0, phases_ms=parts)).seconds == 2.0
    assert judged(result(2.0, phases_ms={**parts, "total": 2100.0})).seconds == 2.1


def test_a_loser_that_was_given_up_is_undecided_not_slower() -> None:
    base = result(0.4, blocks=blocks(0.4, rounds=1))
    given_up = replace(base, assignment=replace(base.assignment, stopping=Stopping(hopeless=0.35)))
    attempt = judged(given_up)
    assert attempt.verdict is Verdict.INCONCLUSIVE
    assert "given up far behind: 0.399 x in 1 round" in attempt.reason
    assert (attempt.speedup.low, attempt.speedup.high) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("at_most", "verdict", "high"),
    [((0.45,), Verdict.INCONCLUSIVE, math.inf), ((0.45, 0.46, 0.44, 0.45), Verdict.SLOWER, 0.55)],
)
def test_what_is_far_behind_without_its_last_row_has_a_bound_and_no_time_of_the_deployment(
    at_most: tuple[float, ...], verdict: Verdict, high: float
) -> None:
    """The row that its part was meant for may be the one that was left out, so that it never ran is no fault."""
    base = result(0.4, blocks=blocks(0.4, rounds=len(at_most)), at_most=at_most, activation={"model": 0})
    prompts = replace(ROW, phase=Phase.PREFILL, query_tokens=64)
    attempt = judged(replace(base, assignment=replace(base.assignment, rows=(ROW, prompts))))
    assert attempt.verdict is verdict
    assert f"even if {prompts.key} took it no time" in attempt.reason
    assert attempt.reason.startswith("given up far behind: at most 0.450 x") == (verdict is Verdict.INCONCLUSIVE)
    assert attempt.speedup.value == pytest.approx(0.45, abs=0.001)
    assert attempt.speedup.low == 0.0, "it may be slower than that by any factor"
    assert 0.45 < attempt.speedup.high <= high
    assert attempt.speedup.kind == "bound"
    assert attempt.tokens_per_second is None


@pytest.mark.parametrize(("purpose", "verdict"), [(Purpose.SEARCH, Verdict.FASTER), (Purpose.COLD, Verdict.INVALID)])
def test_a_claim_has_no_excuse_for_a_disturbed_incumbent(purpose: Purpose, verdict: Verdict) -> None:
    """Perhaps it is the machine: no reason to reject a candidate of the search by, and no speedup to claim."""
    base = result(2.0, incumbent_disturbed=1.5, disturbed_low=0.9)
    attempt = judged(replace(base, assignment=replace(base.assignment, purpose=purpose)))
    assert attempt.verdict is verdict, attempt.reason
