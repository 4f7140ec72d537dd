"""Honest candidates of every kind pass: a false alarm is a failure as much as a cheat that gets through (FAILURES A12).

To pass is to get a verdict on speed: whether an honest part is faster is not asked here. Lossy ones pass where the policy allows
them. The child that served one goes on to the next, since none of them may count as residue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hotpass.parts import declaration, read_part
from hotpass.records.candidate import Candidate, Numerics, Value
from hotpass.records.measurement import Attempt, MeasureResult, Pairing, Tier
from search.catalogue import find_part
from tests.cheats.judging import Bench, candidate_of, planted
from verification.policy import Policy
from verification.verdict import CLOCKS, DISTURBED

HERE = Path(__file__).parent
HONEST = {path.stem: planted(path) for path in sorted((HERE / "parts").glob("*.py"))}
CATALOGUE = {
    path.stem: candidate_of(read_part(path))
    for path in sorted((HERE.parents[1] / "search/catalogue/torch").glob("*.py"))
    if path.stem != "attention-split"  # its domain are contexts longer than any here
}
SETTINGS: dict[str, dict[str, Value]] = {
    "threads=2": {"threads": 2},
    "chunk_tokens=64": {"chunk_tokens": 64},
    "max_batch=1": {"max_batch": 1},
    "kv_dtype=bfloat16": {"kv_dtype": "bfloat16"},
}
COMBINED = {
    "fused-qkv + fused-gate-up": candidate_of(find_part("fused-qkv"), find_part("fused-gate-up")),
    "lean-model in bfloat16": candidate_of(find_part("lean-model"), params={"storage": "bfloat16"}),
    "as loaded": Candidate(),
}
GOOD = HONEST | CATALOGUE | {name: candidate_of(settings=given) for name, given in SETTINGS.items()} | COMBINED


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("good"))
    made.policy = Policy(numerics=Numerics.LOSSY)  # the default one, of a campaign that allows lossy candidates
    yield made
    made.engine.close()


LOOKS = 4
"""A campaign gives a disturbed candidate a second look, since on a shared machine it is seldom its fault. A window here takes four
milliseconds, which other processes of a busy machine may well cover whole, so that there are some more."""


def judged(
    bench: Bench, candidate: Candidate, tier: Tier = Tier.FAST, **changes: object
) -> tuple[MeasureResult, Attempt]:
    """By the default policy, looked at again where only what went on beside it was in question."""
    for _ in range(LOOKS):
        result = bench.measure(candidate, tier, **changes)
        attempt = bench.verdict(result)
        if not attempt.reason.startswith((DISTURBED, CLOCKS)):
            break
    return result, attempt


@pytest.mark.parametrize("name", GOOD)
def test_an_honest_candidate_passes(name: str, bench: Bench) -> None:
    child = bench.engine._loaded.pair().child.pid
    result, attempt = judged(bench, GOOD[name])
    assert attempt.verdict.is_timed, attempt.reason
    assert result.clean is not None
    assert result.clean.clean
    assert {check.against for check in result.checks} == {"reference", "incumbent", "kv"}
    assert bench.engine._loaded.pair().child.pid == child


SERVED = ("sums_in_another_order", "lean-model", "attention-bmm", "max_batch=1", "kv_dtype=bfloat16", "as loaded")


@pytest.mark.parametrize("name", SERVED)
def test_an_honest_candidate_serves_what_the_reference_would(name: str, bench: Bench) -> None:
    result, attempt = judged(bench, GOOD[name], Tier.SLOW)
    assert attempt.verdict.is_timed, attempt.reason
    assert result.tokens is not None
    assert len(result.tokens.regrets) == 6 * 4
    assert result.tokens.agree >= 23


@pytest.mark.parametrize("pairing", [Pairing.ALTERNATING, Pairing.TWO_ENGINES])
def test_an_honest_candidate_passes_in_every_pairing(pairing: Pairing, bench: Bench) -> None:
    _, attempt = judged(bench, GOOD["fused-qkv"], pairing=pairing)
    assert attempt.verdict.is_timed, attempt.reason


def test_an_honest_candidate_passes_over_another_incumbent(bench: Bench) -> None:
    _, attempt = judged(bench, GOOD["fused-qkv"], incumbent=GOOD["lean-model"])
    assert attempt.verdict.is_timed, attempt.reason


def test_what_declares_bit_identity_and_is_passes(bench: Bench) -> None:
    exact = replace(GOOD["reuses_its_buffer"], numerics=Numerics.BIT_IDENTICAL)
    _, attempt = judged(bench, exact)
    assert attempt.verdict.is_timed, attempt.reason


def test_there_are_enough_of_them_and_every_catalogue_part() -> None:
    assert len(GOOD) >= 20
    assert all(declaration(use.source).device != "cuda" for part in CATALOGUE.values() for use in part.parts)
