"""The few to measure: spread where a cap is uncertain, moved by what was measured, and the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.shortlist import Choices, Spans, shortlist


def spans(values: list[float], factor: float) -> Spans:
    made = np.array(values)
    return Spans(value=made, low=made / factor, high=made * factor)


def choices(tpot: list[float], work: list[float], factor: float, deployments: list[int] | None = None) -> Choices:
    size = len(tpot)
    return Choices(
        tpot=spans(tpot, factor), ttft=spans([100.0] * size, factor), work=np.array(work), output_tokens=np.full(size, 1000.0),
        engines=np.zeros(size, np.intp), deployments=np.array(deployments or range(size)),
    )  # fmt: skip


def test_a_certain_prediction_is_ranked() -> None:
    made = choices([10.0, 20.0, 30.0, 60.0], [1e3, 3e3, 5e3, 2e4], 1.001)
    assert shortlist(made, 50.0, 1) == [2]


def test_a_plan_a_little_beyond_the_cap_is_kept_when_that_is_uncertain() -> None:
    """It would be twice as good as all others, and may well hold the cap: a hard cap never measures it."""
    made = choices([30.0, 31.0, 32.0, 51.0], [5e3, 5.1e3, 5.2e3, 2e4], 1.5)
    assert 3 in shortlist(made, 50.0, 2)
    assert 3 not in shortlist(choices([30.0, 31.0, 32.0, 51.0], [5e3, 5.1e3, 5.2e3, 2e4], 1.001), 50.0, 2)


def test_the_few_are_different_plans_and_the_same_each_time() -> None:
    made = choices([10.0, 20.0, 40.0, 60.0, 80.0], [1e3, 3e3, 8e3, 2e4, 3e4], 1.5)
    found = shortlist(made, 50.0, 4)
    assert len(set(found)) == 4
    assert found == shortlist(made, 50.0, 4)
    assert sorted(shortlist(made, 50.0, 9)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("measured_over_predicted", "next_"), [(0.6, 3), (1.6, 1)])
def test_what_was_measured_moves_its_deployment(measured_over_predicted: float, next_: int) -> None:
    """Four loads of one deployment: if the first is faster than predicted, a heavier one holds the cap; if slower, only a lighter."""
    made = choices([20.0, 32.0, 45.0, 72.0], [1e3, 3e3, 6e3, 1.5e4], 1.8, [0, 0, 0, 0])
    asked: list[int] = []

    def measure(plan: int) -> tuple[float, float]:
        asked.append(plan)
        return measured_over_predicted * float(made.tpot.value[plan]), measured_over_predicted * 100.0

    found = shortlist(made, 50.0, 2, measure)
    assert found == asked
    assert found == [2, next_]
