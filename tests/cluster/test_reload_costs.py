"""What reloads cost by class, and the phases as MLflow gets them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.events import Event
from cluster.report.reloads import reload_costs
from cluster.runs import Story, phase_metrics


def result(declared: str, actual: str, install_ms: float, clean_ms: float) -> dict[str, Any]:
    reload = {
        "side": "candidate",
        "declared": declared,
        "actual": actual,
        "phases_ms": {"swap": 1.0, "warm-up": install_ms - 1},
    }
    other = {"side": "incumbent", "declared": "restart", "actual": "restart", "phases_ms": {"swap": 1e6}}
    return {
        "reloads": [other, reload],
        "phases_ms": {"restore": 1.0, "clean": clean_ms, "birth/fork": 9.0, "measure": 50.0},
    }


def test_attempts_are_counted_and_timed_by_what_the_reload_turned_out_to_be() -> None:
    results = [
        result("hot", "hot", 10.0, 4.0),
        result("hot", "hot", 30.0, 6.0),
        result("hot", "hot", 20.0, 5.0),
        result("hot", "reweight", 100.0, 9.0),
        {"reloads": [], "phases_ms": {"clean": 1.0}},
    ]
    hot, reweight = reload_costs(results)
    assert (hot.kind, hot.attempts, hot.costlier_than_declared) == ("hot", 3, 0)
    assert (hot.install_ms, hot.warm_up_ms, hot.return_ms) == (20.0, 19.0, 6.0)
    assert hot.total_seconds == pytest.approx((60 + 15 + 3) / 1e3)
    assert (reweight.kind, reweight.attempts, reweight.costlier_than_declared) == ("reweight", 1, 1)


def test_phases_become_metrics_of_their_own_groups() -> None:
    found = phase_metrics(result("hot", "hot", 10.0, 4.0))
    assert found == {
        "phase ms/restore": 1.0, "phase ms/clean": 4.0, "phase ms/measure": 50.0, "birth ms/fork": 9.0,
        "reload ms/swap": 1.0, "reload ms/warm-up": 9.0,
    }  # fmt: skip


def test_start_up_is_a_series_of_the_campaigns_run_a_step_a_session() -> None:
    decided = {"decision": "start", "session": 2, "startup_ms": {"engine-0": {"import": 7.0, "total": 9.0}}}
    assert Story().apply(Event(seq=1, time=0.0, schema_version=1, kind="decision", payload=decided)) == {
        "startup ms/engine-0 import": (7.0, 2),
        "startup ms/engine-0 total": (9.0, 2),
    }
