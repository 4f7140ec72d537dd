"""KV and served tokens: what is right for each class, and what is not."""

from __future__ import annotations

import pytest

from hotpass.records.candidate import Numerics
from hotpass.records.measurement import TokenCheck
from tests.verification.builders import BAND, check, result
from verification.handover import wrong_for_others
from verification.policy import Policy

POLICY = Policy(numerics=Numerics.LOSSY)


def served(*regrets: float) -> TokenCheck:
    return TokenCheck(regrets=regrets, reference_rms=2.0)


@pytest.mark.parametrize(
    ("numerics", "off", "wrong"),
    [
        (Numerics.TOLERANCE, {"max_abs": 1.9e-3}, False),
        (Numerics.TOLERANCE, {"max_abs": 2.1e-3}, True),
        (Numerics.BIT_IDENTICAL, {"max_abs": 2.1e-3}, True),
        (Numerics.TOLERANCE, {"max_abs": float("inf")}, True),
        (Numerics.LOSSY, {"max_abs": 5.0, "worst_row_rms": 1.9, "kl_mean": 0.1}, False),
        (Numerics.LOSSY, {"max_abs": 5.0, "worst_row_rms": 2.1, "kl_mean": 0.1}, True),
        (Numerics.LOSSY, {"max_abs": 5.0, "worst_row_rms": 0.1, "kl_mean": 0.3}, True),
        (Numerics.LOSSY, {"max_abs": float("inf"), "worst_row_rms": float("inf"), "kl_mean": float("inf")}, True),
    ],
)
def test_kv_is_within_the_bands_of_writer_and_reader(numerics: Numerics, off: dict[str, float], wrong: bool) -> None:
    found = wrong_for_others(result(numerics=numerics, checks=(check(), check(against="kv", **off))), BAND, POLICY)
    assert (found is not None) == wrong
    assert found is None or found.evidence.startswith("KV left on decode n2 q2")


@pytest.mark.parametrize(
    ("numerics", "tokens", "wrong"),
    [
        (Numerics.TOLERANCE, served(0.0, 0.0, 1.9e-3), False),
        (Numerics.TOLERANCE, served(0.0, 0.0, 2.1e-3), True),
        (Numerics.TOLERANCE, served(0.0, float("nan")), True),
        (Numerics.LOSSY, served(*[0.0] * 49, 1.1), False),
        (Numerics.LOSSY, served(*[0.0] * 48, 1.1, 1.1), True),
        (Numerics.LOSSY, served(*[0.9] * 50), False),
    ],
)
def test_served_tokens_are_what_the_reference_might_have_chosen(
    numerics: Numerics, tokens: TokenCheck, wrong: bool
) -> None:
    found = wrong_for_others(result(numerics=numerics, tokens=tokens), BAND, POLICY)
    assert (found is not None) == wrong
    assert found is None or "served tokens are not what" in found.evidence


def test_what_was_not_looked_at_is_not_held_against_anybody() -> None:
    assert wrong_for_others(result(), BAND, POLICY) is None
