"""Ratios of a second objective: of the rows that it is about, of replays, one a round."""

from __future__ import annotations

import math

import pytest

from engines.fake import FakeEngine
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.measurement import Assignment, MeasureResult, Purpose, Tier
from hotpass.records.shapes import Phase, ShapeRow
from search.objectives import TPOT, TTFT, log_ratios_of, parse_objectives, ratios_of

ROWS = tuple(
    ShapeRow(
        phase=phase, num_seqs=1, query_tokens=tokens, context_mean=0, context_max=0, steps_share=0.5, tokens_share=0.5
    )
    for phase, tokens in ((Phase.PREFILL, 64), (Phase.DECODE, 1))
)


def step_ms(candidate: Candidate, row: ShapeRow) -> float:
    """With two threads prefill is twice as fast, and decode as before."""
    return 10.0 / (2.0 if candidate.settings and row.phase is Phase.PREFILL else 1.0)


def measured(tier: Tier) -> MeasureResult:
    order = Assignment(
        incumbent=AS_LOADED, candidate=Candidate(settings={"threads": 2}), tier=tier, purpose=Purpose.SEARCH, rows=ROWS,
        seed=1, deadline_seconds=60.0,
    )  # fmt: skip
    return FakeEngine(step_time=step_ms, noise=0.001).measure(order)


def test_on_fixed_shapes_each_objective_has_rows_of_its_own() -> None:
    result = measured(Tier.FAST)
    assert ratios_of(result) == pytest.approx({TTFT: 2.0, TPOT: 1.0}, rel=0.01)
    rounds = {block.round_index for block in result.blocks}
    assert len(log_ratios_of(result, TTFT)) == len(rounds) > 2
    assert log_ratios_of(result, TTFT) == pytest.approx([math.log(2)] * len(rounds), abs=0.01)
    assert log_ratios_of(result, TPOT) == pytest.approx([0.0] * len(rounds), abs=0.01)


def test_of_replays_there_is_one_ratio_a_block() -> None:
    result = measured(Tier.SLOW)
    # The fake's requests take the mean step: 10 ms as loaded, 7.5 with the setting.
    assert log_ratios_of(result, TTFT) == pytest.approx([math.log(10 / 7.5)] * len(result.replays), abs=0.01)
    assert ratios_of(result)[TPOT] == pytest.approx(10 / 7.5, rel=0.01)


def test_rows_that_show_nothing_of_an_objective_leave_it_out() -> None:
    order = measured(Tier.FAST).assignment
    only = FakeEngine(step_time=step_ms).measure(
        Assignment(
            incumbent=order.incumbent,
            candidate=order.candidate,
            tier=Tier.FAST,
            purpose=Purpose.SEARCH,
            rows=ROWS[1:],
            seed=1,
            deadline_seconds=60.0,
        )
    )
    assert set(ratios_of(only)) == {TPOT}
    assert log_ratios_of(only, TTFT) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft", "does not begin with tokens_per_s"),
        ("tokens_per_s,ttfd", "did you mean 'ttft'"),
        ("tokens_per_s,ttft,tpot", "is not one or two different objectives"),
        ("tokens_per_s,tokens_per_s", "is not one or two different objectives"),
        ("", "is not one or two different objectives"),
    ],
)
def test_objectives_that_cannot_be_searched_for_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_objectives(text)
