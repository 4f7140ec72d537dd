"""Values chained through incumbents, by one objective and by two, and who is on their Pareto front."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hotpass.records.measurement import Tier, Verdict
from search.objectives import TOKENS_PER_S, TTFT
from search.values import Values, front_of
from tests.search.builders import attempt

LOADED = "loaded"


def values_with_loaded(*objectives: str) -> Values:
    values = Values(objectives)
    values.every[LOADED] = (0.0,) * len(objectives)
    return values


def test_two_objectives_are_chained_each_by_its_own_ratio() -> None:
    values = values_with_loaded(TOKENS_PER_S, TTFT)
    values.take(replace(attempt("a", LOADED, 1.5), ratios={TTFT: 2.0}))
    assert values.take(replace(attempt("b", "a", 1.2), ratios={TTFT: 0.5})) == pytest.approx((math.log(1.8), 0.0))
    assert values.leading["b"] == pytest.approx(math.log(1.8))


def test_one_with_its_incumbent_has_its_values_whatever_a_replay_says() -> None:
    values = values_with_loaded(TOKENS_PER_S)
    values.take(attempt("a", LOADED, 1.5))
    assert values.take(attempt("b", "a", 3.0, tier=Tier.SLOW), is_one_with_incumbent=True) == (math.log(1.5),)


def test_the_fast_tiers_values_stay() -> None:
    values = values_with_loaded(TOKENS_PER_S)
    values.take(attempt("a", LOADED, 1.5))
    values.take(attempt("a", LOADED, 1.1, tier=Tier.SLOW))
    assert values.leading["a"] == pytest.approx(math.log(1.5))
    assert values.is_fast("a")


@pytest.mark.parametrize("ratios", [{}, {TTFT: math.inf}, {TTFT: 0.0}])
def test_what_is_not_finite_in_one_objective_is_no_value(ratios: dict[str, float]) -> None:
    values = values_with_loaded(TOKENS_PER_S, TTFT)
    assert values.take(replace(attempt("a", LOADED, 1.5), ratios=ratios)) == ()
    assert not values.can_chain("a")


def test_an_incumbent_without_a_value_is_a_fault_and_an_anchor_is_none() -> None:
    values, other = values_with_loaded(TOKENS_PER_S), values_with_loaded(TOKENS_PER_S)
    with pytest.raises(ValueError, match="never measured"):
        values.take(attempt("b", "a", 1.2))
    other.take(attempt("a", LOADED, 1.5))
    values.anchor("a", other)
    assert values.take(attempt("b", "a", 1.2)) == pytest.approx((math.log(1.8),))
    assert "a" not in values.every


def test_what_failed_is_no_value() -> None:
    assert values_with_loaded(TOKENS_PER_S).take(attempt("a", LOADED, verdict=Verdict.FAILED)) == ()


def test_the_front_is_what_nobody_beats_in_both() -> None:
    points = {"fast": (3.0, 1.0), "both": (2.0, 2.0), "worse": (1.9, 1.9), "first": (1.0, 3.0), "same": (2.0, 2.0)}
    assert front_of(points) == ["fast", "both", "first"]
    assert front_of({key: (first,) for key, (first, _) in points.items()}) == ["fast"]
    assert front_of({}) == []
