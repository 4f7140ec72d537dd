"""A claim names its denominator; a gate that did not run is no pass."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hotpass.records.candidate import Numerics
from hotpass.records.measurement import Agreement, Estimate, Pairing, Purpose
from tests.verification.builders import BAND, TABLE, candidate, check, result
from verification.claims import Baseline, claims_of, ratio
from verification.gates import first_gates, passed
from verification.numerics import calibrate
from verification.policy import Policy
from verification.verdict import judge


def estimate(value: float, spread: float = 0.02) -> Estimate:
    return Estimate(value=value, low=value * math.exp(-spread), high=value * math.exp(spread))


LOADED = Baseline(name="as loaded", numerics=Numerics.TOLERANCE, speedup_vs_loaded=estimate(1.0, 0.0), max_abs=1e-5)
BF16 = Baseline(name="eager bf16", numerics=Numerics.LOSSY, speedup_vs_loaded=estimate(2.0), max_abs=0.7)
SDPA = Baseline(name="sdpa fp32", numerics=Numerics.TOLERANCE, speedup_vs_loaded=estimate(1.25), max_abs=2e-5)


def test_denominators_are_chosen_by_class_and_by_accuracy() -> None:
    claims = claims_of(estimate(10.0), Numerics.TOLERANCE, 6e-5, 6e-5, LOADED, [BF16, SDPA])
    assert claims.vs_loaded.estimate.value == 10.0
    assert claims.vs_best_same_class is not None
    assert claims.vs_best_same_class.baseline == "sdpa fp32"
    assert claims.vs_best_same_class.estimate.value == pytest.approx(8.0)
    lossy = claims_of(estimate(16.0), Numerics.LOSSY, 0.9, 6e-5, LOADED, [BF16, SDPA])
    assert lossy.vs_best_same_class is not None
    assert lossy.vs_best_same_class.baseline == "eager bf16"
    assert lossy.vs_best_as_accurate is not None
    assert lossy.vs_best_as_accurate.estimate.value == pytest.approx(8.0)


def test_an_empty_class_is_null() -> None:
    only_bf16 = replace(LOADED, numerics=Numerics.LOSSY, max_abs=0.7)
    claims = claims_of(estimate(3.0), Numerics.TOLERANCE, 6e-5, 6e-5, only_bf16, [])
    assert claims.vs_best_same_class is None
    assert claims.vs_best_as_accurate is None


def test_intervals_of_a_ratio_add_in_quadrature() -> None:
    found = ratio(estimate(10.0, 0.03), estimate(2.0, 0.04))
    assert found.value == pytest.approx(5.0)
    assert math.log(found.high / 5.0) == pytest.approx(0.05)
    assert math.log(5.0 / found.low) == pytest.approx(0.05)


def agreement(**changes: object) -> Agreement:
    base = Agreement(
        texts=4,
        positions=200,
        agree=199,
        clear=190,
        clear_agree=190,
        noise_abs=6e-5,
        max_abs=6e-5,
        kl_mean=1e-9,
        bit_equal=False,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def cold() -> object:
    base = result(3.0)
    order = replace(base.assignment, purpose=Purpose.COLD, pairing=Pairing.TWO_ENGINES)
    return replace(base, assignment=order)


def gates(**changes: object) -> dict[str, str]:
    measured = cold()
    attempt = judge(measured, policy=Policy(), band=BAND, shapes=TABLE, num_layers=2)  # type: ignore[arg-type]
    given: dict[str, object] = {
        "cold": measured, "cold_attempt": attempt, "agreement": agreement(), "weights_unchanged": True, "band": BAND, "policy": Policy(),
    }  # fmt: skip
    return {gate.name: gate.text for gate in first_gates(candidate(), **{**given, **changes})}  # type: ignore[arg-type]


def test_all_gates_pass_for_an_honest_winner() -> None:
    assert passed(gates())


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"agreement": None}, "greedy-agreement", "not run"),
        ({"agreement": agreement(clear_agree=189)}, "greedy-agreement", "fail"),
        ({"agreement": agreement(max_abs=0.5)}, "greedy-agreement", "fail"),
        ({"weights_unchanged": False}, "weights", "fail"),
        ({"weights_unchanged": None}, "weights", "not run"),
        ({"cold": None}, "cold", "not run"),
        ({"cold": result(3.0)}, "cold", "fail"),
        ({"cold": replace(result(3.0), checks=(check(max_abs=1.0),))}, "logits", "fail"),
    ],
)
def test_each_gate_can_fail_and_not_run_is_not_a_pass(changes: dict[str, object], name: str, says: str) -> None:
    found = gates(**changes)
    assert found[name].startswith(says)
    assert not passed(found)


def test_the_band_comes_from_reordering_and_widens_only_for_a_narrow_dtype() -> None:
    reordered, loaded = [check(max_abs=2e-5)], [check(max_abs=0.74, worst_row_rms=0.2)]
    exact = calibrate(reordered, loaded, "float32", Policy())
    assert exact.max_abs == pytest.approx(16 * 2e-5)
    narrow = calibrate(reordered, loaded, "bfloat16", Policy())
    assert narrow.max_abs == pytest.approx(1.5 * 0.74)
    assert narrow.noise_abs == pytest.approx(2e-5)
    with pytest.raises(ValueError, match="needs one"):
        calibrate([], loaded, "float32", Policy())
    with pytest.raises(ValueError, match="not finite"):
        calibrate([check(max_abs=math.nan)], [], "float32", Policy())
