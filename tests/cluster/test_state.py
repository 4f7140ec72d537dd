"""Ratios that are chained, and the state that a log folds to."""

from __future__ import annotations

import math

import pytest

from cluster.events import Event
from cluster.state import UNITY, CampaignState, chain
from hotpass.records.measurement import Estimate

A = Estimate(value=2.0, low=1.8, high=2.2)
B = Estimate(value=1.5, low=1.2, high=1.8)


def test_chained_ratios_multiply_and_their_half_widths_add_in_quadrature() -> None:
    both = chain(A, B)
    assert both.value == pytest.approx(3.0)
    assert math.log(both.value / both.low) == pytest.approx(math.hypot(math.log(2 / 1.8), math.log(1.5 / 1.2)))
    assert math.log(both.high / both.value) == pytest.approx(math.hypot(math.log(2.2 / 2), math.log(1.8 / 1.5)))
    assert chain(A, UNITY) == A


def test_a_chain_of_two_kinds_is_predicted() -> None:
    assert chain(A, Estimate(value=1.5, low=1.2, high=1.8, kind="simulated")).kind == "predicted"


def test_an_interval_without_a_lower_end_stays_so() -> None:
    assert chain(Estimate(value=2.0, low=0.0, high=math.inf), B).low == 0.0


def test_an_attempt_that_is_recorded_twice_counts_once() -> None:
    attempt = {
        "candidate_id": "c", "incumbent_id": "i", "tier": "fast", "purpose": "search", "verdict": "failed", "reason": "crash",
        "speedup": None, "tokens_per_second": None, "gates": {}, "numerics_measured": {}, "rounds": 0, "seconds": 0.0,
    }  # fmt: skip
    state = CampaignState()
    for seq in (1, 2):
        payload = {"assignment": 0, "attempt": attempt, "speedup_vs_loaded": None, "elapsed_seconds": float(seq)}
        state.apply(Event(seq=seq, time=0.0, schema_version=1, kind="attempt", payload=payload))
    assert len(state.attempts) == 1
    assert state.rejected() == {"failed": 1}


def test_what_attempts_have_in_common_is_kept_once() -> None:
    state = CampaignState()
    for number in range(2):
        attempt = {
            "candidate_id": f"candidate-{number}", "incumbent_id": "".join(["the ", "incumbent"]), "tier": "fast", "purpose": "search",
            "verdict": "inconclusive", "reason": "", "speedup": {"value": 1.0 + number, "low": 0.5, "high": 2.5, "level": 0.95, "kind": "measured"},
            "tokens_per_second": None, "gates": {"numerics": "pass", "integrity": "pass"}, "numerics_measured": {},
        }  # fmt: skip
        vs_loaded = {**attempt["speedup"], "value": 1.0}  # type: ignore[dict-item]
        payload = {"assignment": number, "attempt": attempt, "speedup_vs_loaded": vs_loaded, "elapsed_seconds": 1.0}
        state.apply(Event(seq=number + 1, time=0.0, schema_version=1, kind="attempt", payload=payload))
    first, second = state.attempts
    assert first.attempt.gates is second.attempt.gates
    assert first.attempt.incumbent_id is second.attempt.incumbent_id
    assert first.speedup_vs_loaded is first.attempt.speedup
    assert second.speedup_vs_loaded == Estimate(value=1.0, low=0.5, high=2.5)
    assert (first.attempt.candidate_id, second.attempt.candidate_id) == ("candidate-0", "candidate-1")


def test_kinds_that_say_nothing_about_standing_are_passed_over() -> None:
    state = CampaignState()
    state.apply(Event(seq=1, time=0.0, schema_version=1, kind="lease", payload={"text": "mark me as best"}))
    assert (state.last_seq, state.best_so_far()) == (1, None)


def test_a_post_changes_the_board_only() -> None:
    state = CampaignState()
    content = {"author": "agent:mlp", "kind": "finding", "text": "mark me as best", "candidates": [], "evidence": []}
    payload = {**content, "note_id": "n1", "elapsed_seconds": 2.0}
    for seq in (1, 2):
        state.apply(Event(seq=seq, time=0.0, schema_version=1, kind="post", payload=payload))
    assert [(row.seq, row.post.text) for row in state.posts] == [(1, "mark me as best")]
    assert (state.best_so_far(), state.candidates, state.incumbents) == (None, {}, [])
