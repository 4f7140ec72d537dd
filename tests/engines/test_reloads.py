"""Warm A→B equals cold B and A→B→A gives A back, or it is said what does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.decoder_engine import DecoderEngine
from engines.program import CandidateFailed
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Purpose, Tier
from tests.engines.conftest import ROWS, assignment, candidate, toy_engine

HONEST = candidate("return reference(tokens, summaries)")
OFF = candidate("return reference(tokens, summaries) + 0.5")
MARKS = candidate("return reference(tokens, summaries)", setup="torch.marked = True")
FOLLOWS = candidate("return reference(tokens, summaries) + (0.25 if hasattr(torch, 'marked') else 0.0)")


@pytest.fixture(scope="module")
def audited(deployment: Deployment) -> Iterator[DecoderEngine]:
    """A toy engine that audits every attempt of a search."""
    with toy_engine(audited_share=1.0) as engine:
        engine.load(deployment, Tier.FAST)
        yield engine


@pytest.mark.parametrize(("before", "after"), [(AS_LOADED, HONEST), (HONEST, OFF), (OFF, AS_LOADED)])
def test_an_honest_reload_holds_bit_for_bit(before: Candidate, after: Candidate, audited: DecoderEngine) -> None:
    proof = audited.verify_reload(before, after)
    assert proof.holds, proof.reason
    assert (proof.before_id, proof.candidate_id) == (before.id, after.id)
    assert (proof.windows, proof.epoch) == (len(ROWS), audited._loaded.weights.sha256)


def test_what_follows_from_the_one_before_is_not_the_candidate(audited: DecoderEngine) -> None:
    proof = audited.verify_reload(MARKS, FOLLOWS)
    assert proof.warm_cold_max_abs == pytest.approx(0.25, abs=1e-3)
    assert "otherwise than cold" in proof.reason


def test_what_does_not_come_back_is_noticed(audited: DecoderEngine) -> None:
    proof = audited.verify_reload(FOLLOWS, MARKS)
    assert proof.warm_cold_max_abs == 0.0
    assert proof.back_max_abs == pytest.approx(0.25, abs=1e-3)
    assert "does not come back" in proof.reason


def test_a_crash_in_a_proof_is_the_candidates(audited: DecoderEngine) -> None:
    with pytest.raises(CandidateFailed, match="SIGSEGV"):
        audited.verify_reload(AS_LOADED, candidate("ctypes.string_at(0)"))
    assert audited.verify_reload(AS_LOADED, HONEST).holds


def test_searches_are_audited_and_other_purposes_are_not(audited: DecoderEngine, deployment: Deployment) -> None:
    searched = audited.measure(assignment(deployment, HONEST))
    assert searched.phases_ms["audit"] > 0
    assert searched.clean is not None
    assert searched.clean.clean
    again = audited.measure(assignment(deployment, HONEST, purpose=Purpose.REMEASURE))
    assert "audit" not in again.phases_ms


def test_an_audit_that_finds_something_makes_the_attempt_unclean(
    audited: DecoderEngine, deployment: Deployment
) -> None:
    result = audited.measure(assignment(deployment, FOLLOWS, incumbent=MARKS))
    assert result.clean is not None
    assert any(reason.startswith("reload: after another candidate") for reason in result.clean.reasons)


def test_a_share_of_nothing_audits_nothing(deployment: Deployment, toy: DecoderEngine) -> None:
    toy._judge._audited_share = 0.0
    assert "audit" not in toy.measure(assignment(deployment, HONEST)).phases_ms
