"""What the report says each proposer was worth."""

from __future__ import annotations

import math

import pytest

from cluster.report.proposers import proposers_section, worths
from cluster.state import AttemptRow, CampaignState, CandidateInfo
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict


def row(
    seq: int, candidate: str, value: float, *, low: float | None = None, purpose: Purpose = Purpose.SEARCH
) -> AttemptRow:
    estimate = Estimate(value=value, low=value * 0.95 if low is None else low, high=value * 1.05, level=0.95)
    attempt = Attempt(
        candidate_id=candidate,
        incumbent_id="loaded",
        tier=Tier.FAST,
        purpose=purpose,
        verdict=Verdict.FASTER if estimate.low > 1 else Verdict.INCONCLUSIVE,
        reason="",
        speedup=estimate,
        tokens_per_second=1.0,
        seconds=90.0,
    )
    return AttemptRow(seq=seq, assignment=seq, elapsed_seconds=60.0 * seq, attempt=attempt, speedup_vs_loaded=estimate)


def info(key: str, proposer: str) -> CandidateInfo:
    return CandidateInfo(
        candidate_id=key,
        label=key,
        numerics="tolerance",
        proposer=proposer,
        parents=(),
        hypothesis="",
        parts=(),
        settings={},
    )


@pytest.fixture
def state() -> CampaignState:
    """An agent's candidate leads and holds cold; the sampler's leads twice, and the control borrows its first."""
    rows = [
        row(1, "a", 1.5),
        row(2, "b", 1.2),
        row(3, "c", 2.0),
        row(4, "d", 1.9, low=0.9),
        row(5, "c", 1.8, purpose=Purpose.COLD),
    ]
    proposers = {"a": "optuna", "b": "optuna", "c": "agent:mlp", "d": "random"}
    return CampaignState(
        candidates={key: info(key, who) for key, who in proposers.items()},
        attempts=rows,
        borrowed=["a"],
        elapsed_seconds=400.0,
    )


def test_each_is_charged_for_its_own_and_what_the_control_borrowed(state: CampaignState) -> None:
    found = {worth.name: worth for worth in worths(state)}
    assert {name: (worth.attempts, worth.engine_seconds) for name, worth in found.items()} == {
        "optuna": (3, 270.0),
        "agent:mlp": (1, 90.0),
        "control": (1, 90.0),
    }
    assert found["optuna"].steps == ((60.0, 1.5),), "neither a smaller gain nor one that may be none is a step"
    assert found["agent:mlp"].steps == ((180.0, 2.0),)


def test_only_what_was_measured_cold_is_a_confirmed_gain(state: CampaignState) -> None:
    found = {worth.name: worth for worth in worths(state)}
    assert found["agent:mlp"].cold_gain_per_hour == pytest.approx(math.log(1.8) * 40)
    assert found["optuna"].cold_gain_per_hour is None
    text = proposers_section(state)
    assert "agent:mlp" in text
    assert text.count("<path") == 3
    assert proposers_section(CampaignState()) == ""
