"""A lossy candidate may lose near ties either way, and nothing else: what it answers there is looked at, too."""

from __future__ import annotations

import numpy as np
import pytest

from engines.judge.checks import DECIDED_MARGIN, check_outputs
from hotpass.records.candidate import Numerics
from tests.verification.builders import BAND, ROW
from verification.numerics import Finding, right_for_class
from verification.policy import Policy

WANT = np.random.default_rng(3).normal(size=(1, 200, 60)).astype(np.float32)
SCALE = WANT.std(axis=-1)
ORDER = WANT.argsort(axis=-1)
TOP = np.take_along_axis(WANT, ORDER, axis=-1)
NEAR_TIES = TOP[..., -1] - TOP[..., -2] <= DECIDED_MARGIN * SCALE


def raised(rank: int) -> np.ndarray:
    """The token of that rank becomes the greedy one, by a hair, wherever the reference has a near tie."""
    got = WANT.copy()
    for row in np.flatnonzero(NEAR_TIES[0]):
        got[0, row, ORDER[0, row, -1 - rank]] = TOP[0, row, -1] + 0.01
    return got


def judged(got: np.ndarray) -> Finding:
    check = check_outputs(ROW, "reference", got, WANT, 0.0)
    assert check.argmax_decided_agree == check.argmax_decided > 100, "wrong nowhere but in near ties"
    assert check.kl_mean < Policy().lossy_kl
    return right_for_class((check,), Numerics.LOSSY, BAND, Policy(numerics=Numerics.LOSSY))


def test_a_near_tie_may_go_the_other_way() -> None:
    assert 20 < NEAR_TIES.sum() < 60
    assert judged(raised(1)).ok


@pytest.mark.parametrize("rank", [8, 12])
def test_it_may_go_no_other_way(rank: int) -> None:
    finding = judged(raised(rank))
    assert not finding.ok
    assert "nearly as good" in finding.evidence
