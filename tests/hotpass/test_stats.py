"""The sequential test keeps its error rates at every look, and the ratios are ratios of sums."""

from __future__ import annotations

import math

import pytest

from hotpass.records.measurement import MeasuredBlock, Stopping
from hotpass.records.shapes import Phase, ShapeRow
from hotpass.stats import (
    SequentialTest,
    confidence_radius,
    kendall_tau,
    rounds_for,
    simulate_decisions,
    speedup_of_blocks,
    student_quantile,
    tokens_per_second,
    weighted_round,
)


def row(share: float, n: int = 1) -> ShapeRow:
    return ShapeRow(
        phase=Phase.DECODE,
        num_seqs=n,
        query_tokens=n,
        context_mean=64,
        context_max=64,
        steps_share=share,
        tokens_share=share,
    )


def block(share: float, incumbent: float, candidate: float, index: int = 0) -> MeasuredBlock:
    return MeasuredBlock(
        row=row(share),
        round_index=index,
        order="ABBA",
        incumbent_ms=(incumbent, incumbent),
        candidate_ms=(candidate, candidate),
        steps_per_window=1,
        child_clock_ratio=1.0,
        layers=2,
    )


@pytest.mark.parametrize("sigma", [0.005, 0.03, 0.1])
def test_false_claims_stay_below_alpha_over_all_looks(sigma: float) -> None:
    stopping = Stopping(alpha=0.05, max_rounds=40, half_width=1e-9, equal_margin=0.0)
    found = simulate_decisions(lambda rng: rng.normal(0, sigma), stopping, repeats=1500, seed=1)
    assert (found.get("faster", 0) + found.get("slower", 0)) / 1500 <= 0.05


def test_false_claims_stay_below_alpha_when_the_first_rounds_are_brief() -> None:
    """Three rounds of half the windows: a spread larger by a root of two (`engines.judge.rounds.BRIEF_ROUNDS`)."""
    import numpy as np

    rng, false = np.random.default_rng(4), 0
    for _ in range(1000):
        test = SequentialTest(Stopping(alpha=0.05, max_rounds=40, half_width=1e-9, equal_margin=0.0))
        while (decision := test.decision()) is None:
            test.add(rng.normal(0, 0.03) * (math.sqrt(2) if len(test.values) < 3 else 1.0))
        false += decision in ("faster", "slower")
    assert false / 1000 <= 0.05


def test_a_naive_test_at_every_look_would_not() -> None:
    """The same simulation with a fixed-sample t interval claims far too often: what the e-process is for."""
    import numpy as np

    rng, false = np.random.default_rng(1), 0
    for _ in range(500):
        values: list[float] = []
        for _ in range(40):
            values.append(rng.normal(0, 0.03))
            n = len(values)
            if n >= 3 and abs(np.mean(values)) > 2.0 * np.std(values, ddof=1) / math.sqrt(n):
                false += 1
                break
    assert false / 500 > 0.15


def test_a_five_percent_effect_is_found_and_signed() -> None:
    found = simulate_decisions(
        lambda rng: rng.normal(math.log(1.05), 0.03), Stopping(max_rounds=60), repeats=300, seed=2
    )
    assert found.get("faster", 0) >= 291
    found = simulate_decisions(
        lambda rng: rng.normal(-math.log(1.05), 0.03), Stopping(max_rounds=60), repeats=300, seed=3
    )
    assert found.get("slower", 0) >= 291


def test_a_factor_of_two_is_decided_at_once_and_equality_is_recognised() -> None:
    test = SequentialTest(Stopping())
    for value in (0.69, 0.70, 0.71):
        assert test.decision() is None
        test.add(value)
    assert test.decision() == "faster"
    test = SequentialTest(Stopping(equal_margin=0.01, half_width=0.0))
    while test.decision() is None:
        test.add(0.001 if len(test.values) % 2 else -0.001)
    assert test.decision() == "equal"


def test_non_finite_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no measurement"):
        SequentialTest(Stopping()).add(math.nan)


def test_two_equal_readings_are_not_certainty() -> None:
    test = SequentialTest(Stopping())
    test.add(0.5)
    test.add(0.5)
    assert test.interval() == (-math.inf, math.inf)
    assert confidence_radius(1, 0.1, 0.05) == math.inf


def test_a_speedup_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    # 90 % of steps take 10 ms and become 5; 10 % take 100 ms and stay: (9 + 10) / (4.5 + 10)
    blocks = [block(0.9, 10, 5, i) for i in range(3)] + [block(0.1, 100, 100, i) for i in range(3)]
    assert math.exp(weighted_round([blocks[0], blocks[3]])) == pytest.approx(19 / 14.5)
    assert speedup_of_blocks(blocks).value == pytest.approx(19 / 14.5)
    assert tokens_per_second(blocks, 2.0, candidate=True) == pytest.approx(2.0 / 14.5e-3)


def test_an_unfinished_round_is_left_out() -> None:
    blocks = [block(0.5, 10, 5, 0), block(0.5, 10, 5, 0), block(0.5, 10, 1, 1)]
    assert speedup_of_blocks(blocks).value == pytest.approx(2.0)


def test_the_bootstrap_interval_covers() -> None:
    import numpy as np

    rng, covered = np.random.default_rng(5), 0
    for repeat in range(200):
        blocks = [block(1.0, 10 * math.exp(rng.normal(0, 0.03)), 8.0, i) for i in range(6)]
        estimate = speedup_of_blocks(blocks, seed=repeat)
        covered += estimate.low <= 1.25 <= estimate.high
    assert covered / 200 >= 0.92


def test_kendall_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 1], [1, 2]) is None


def test_rounds_for_falls_with_the_effect() -> None:
    assert rounds_for(0.69, 0.03, 0.02, 0.8) == 3
    assert 8 <= rounds_for(0.05, 0.03, 0.02, 0.8) <= 20


def test_a_loser_far_behind_is_given_up_after_a_round_only_where_that_is_asked() -> None:
    asked, patient = Stopping(hopeless=0.35), Stopping()
    for stopping, decision in ((asked, "hopeless"), (patient, None)):
        test = SequentialTest(stopping)
        test.add(math.log(0.5))
        assert test.decision() == decision
    for value in (math.log(0.8), math.log(3.0)):
        test = SequentialTest(asked)
        test.add(value)
        assert test.decision() is None


def test_giving_up_makes_no_claim_of_faster_more_likely() -> None:
    found = simulate_decisions(
        lambda rng: rng.normal(0, 0.2),
        Stopping(alpha=0.05, half_width=1e-9, equal_margin=0.0, hopeless=0.35),
        repeats=1500,
        seed=4,
    )
    assert found["hopeless"] > 20
    assert found.get("faster", 0) / 1500 <= 0.025


def test_a_block_of_one_window_a_side_weighs_like_one_of_two() -> None:
    from dataclasses import replace

    whole = block(0.5, 30.0, 10.0)
    brief = replace(whole, order="BA", incumbent_ms=(30.0,), candidate_ms=(10.0,))
    assert brief.log_ratio == pytest.approx(math.log(3))
    assert weighted_round([whole, brief]) == pytest.approx(math.log(3))
    uneven = replace(whole, incumbent_ms=(10.0, 40.0))
    assert uneven.incumbent_step_ms == pytest.approx(20.0)


@pytest.mark.parametrize(("freedom", "value"), [(4, 3.747), (5, 3.365), (10, 2.764), (30, 2.457), (1000, 2.330)])
def test_the_quantile_of_few_values_is_students(freedom: int, value: float) -> None:
    """The table's values for 0.99."""
    assert student_quantile(0.99, freedom) == pytest.approx(value, rel=0.02)
    assert student_quantile(0.01, freedom) == pytest.approx(-student_quantile(0.99, freedom))
