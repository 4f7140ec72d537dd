"""Small real records for the tests of verdicts and gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, PartUse
from hotpass.records.measurement import (
    Assignment,
    CleanReport,
    Environment,
    MeasuredBlock,
    MeasureResult,
    OutputCheck,
    Pairing,
    Purpose,
    Tier,
)
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from verification.numerics import Band

ROW = ShapeRow(
    phase=Phase.DECODE, num_seqs=2, query_tokens=2, context_mean=64, context_max=64, steps_share=1.0, tokens_share=1.0
)
TABLE = ShapeTable(rows=(ROW,), concurrency=2, chunk_tokens=64, num_steps=100, output_tokens_per_step=2.0)
BAND = Band(max_abs=1e-3, row_rms=5e-4, noise_abs=6e-5, source="test")
SOURCE = PartSource(name="fast", files=(("part.py", "…"),))


def candidate(numerics: Numerics = Numerics.TOLERANCE) -> Candidate:
    return Candidate(parts=(PartUse(source=SOURCE),), numerics=numerics)


def blocks(speedup: float, rounds: int = 4, **changes: Any) -> tuple[MeasuredBlock, ...]:
    base = MeasuredBlock(
        row=ROW,
        round_index=0,
        order="ABBA",
        incumbent_ms=(10.0, 10.0),
        candidate_ms=(10.0, 10.0),
        steps_per_window=4,
        child_clock_ratio=0.98,
        layers=2,
    )
    made = []
    for index in range(rounds):
        wobble = 1 + 0.002 * (-1) ** index
        time = 10.0 / speedup * wobble
        made.append(replace(base, round_index=index, candidate_ms=(time, time), **changes))
    return tuple(made)


def check(**changes: Any) -> OutputCheck:
    base = OutputCheck(
        row=ROW,
        against="reference",
        max_abs=5e-5,
        rms=1e-5,
        reference_rms=2.0,
        worst_row_rms=2e-5,
        bit_equal=False,
        positions=16,
        argmax_agree=16,
        argmax_clear=16,
        argmax_clear_agree=16,
        kl_mean=1e-9,
    )
    return replace(base, **changes)


def result(speedup: float = 2.0, numerics: Numerics = Numerics.TOLERANCE, **changes: Any) -> MeasureResult:
    order = Assignment(
        incumbent=AS_LOADED,
        candidate=candidate(numerics),
        tier=Tier.FAST,
        purpose=Purpose.SEARCH,
        rows=(ROW,),
        seed=1,
        deadline_seconds=60.0,
        pairing=Pairing.SIDE_BY_SIDE,
    )
    base = MeasureResult(
        assignment=order,
        engine="test",
        epoch="e",
        environment=Environment(hardware_id="h", threads=2, thread_env={}, versions={}),
        blocks=blocks(speedup),
        checks=(check(),),
        activation={"model": 16},
        clean=CleanReport(clean=True),
        noise_floor=0.01,
    )
    return replace(base, **changes)
