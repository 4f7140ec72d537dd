"""Which finalists are worth a cold measurement."""

from __future__ import annotations

import math

import pytest

from cluster.finish import is_beaten
from cluster.state import AttemptRow, CampaignState
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict

LEADER, OTHER = "leader", "other"


def state_with(verdict: Verdict, value: float, incumbent: str = LEADER) -> CampaignState:
    attempt = Attempt(
        candidate_id=OTHER,
        incumbent_id=incumbent,
        tier=Tier.FAST,
        purpose=Purpose.SEARCH,
        verdict=verdict,
        reason="",
        speedup=Estimate(value=value, low=0.0, high=math.inf, level=0.98),
        tokens_per_second=1.0,
    )
    row = AttemptRow(seq=1, assignment=0, elapsed_seconds=1.0, attempt=attempt, speedup_vs_loaded=None)
    return CampaignState(attempts=[row], by_candidate={OTHER: [row]})


@pytest.mark.parametrize(
    ("verdict", "value", "beaten"),
    [
        (Verdict.SLOWER, 0.9, True),
        (Verdict.INCONCLUSIVE, 0.6, True),
        (Verdict.INCONCLUSIVE, 0.97, False),
        (Verdict.FASTER, 1.1, False),
    ],
)
def test_who_was_slower_beside_a_better_finalist_is_beaten(verdict: Verdict, value: float, beaten: bool) -> None:
    assert is_beaten(state_with(verdict, value), OTHER, [LEADER]) is beaten


def test_slower_than_something_else_is_not_beaten() -> None:
    assert not is_beaten(state_with(Verdict.SLOWER, 0.9, incumbent="a third"), OTHER, [LEADER])
    assert not is_beaten(state_with(Verdict.SLOWER, 0.9), "never tried", [LEADER])
