"""Which rows have how many windows a round, and that a block is what its windows were."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pytest

from engines.judge.inputs import RandomTokens, drawer, window_tokens
from engines.judge.rounds import Evidence, Plan, Rounds
from engines.judge.rows import brief_rows, late_rows, long_rows
from engines.judge.windows import Window
from engines.program import CandidateFailed, KvPlan
from hotpass.records.measurement import FailureKind, Side, Stopping
from hotpass.records.shapes import Phase, ShapeRow


def row(phase: Phase, query: int, share: float) -> ShapeRow:
    return ShapeRow(
        phase=phase,
        num_seqs=1,
        query_tokens=query,
        context_mean=8,
        context_max=8,
        steps_share=share,
        tokens_share=share,
    )


KV = KvPlan(
    rows=(row(Phase.DECODE, 1, 0.99), row(Phase.PREFILL, 6, 0.01)),
    steps_per_window=(2, 1),
    serving_slots=0,
    serving_context=0,
    widths=(4, 4),
)
STEP_SECONDS = {Side.INCUMBENT: 0.002, Side.CANDIDATE: 0.001}


class ScriptedPair:
    """Each side takes its own time; what ran is noted in order."""

    keeps_both = True

    def __init__(self, seconds: Mapping[Side, float] = STEP_SECONDS) -> None:
        self.seconds = seconds
        self.ran: list[tuple[int, Side]] = []
        self.deadlines: list[float] = []

    def window(self, side: Side, cut: int, row: int, tokens: np.ndarray, deadline: float) -> Window:
        self.ran.append((row, side))
        self.deadlines.append(deadline)
        seconds = self.seconds[side] * len(tokens)
        logits = np.ones((len(tokens), 1, 4), np.float32)
        return Window(seconds=seconds, child_seconds=seconds, logits=logits, activation={})


def rounds(
    pair: ScriptedPair,
    evidence: Evidence,
    brief: frozenset[int],
    slowed: Callable[[], Sequence[str]] = tuple,
    brief_rounds: int = 0,
    late: frozenset[int] = frozenset(),
    alone: Mapping[tuple[int, int], float] | None = None,
) -> Rounds:
    source = RandomTokens(100, 1)
    rng = random.Random(3)
    places = [(0, 0), (0, 1)]
    plan = Plan(
        kv=KV,
        depths={0: 2},
        places=places,
        drawers={place: drawer((), partial(window_tokens, source, KV, place[1]), rng) for place in places},
        noise_abs=0.0,
        incumbent_is_loaded=True,
        brief_rows=brief,
        brief_rounds=brief_rounds,
        late_rows=late,
        far_behind=0.5,
        alone_seconds=alone or {},
        slowed=slowed,
    )
    return Rounds(pair, plan, evidence, rng)  # type: ignore[arg-type]


def test_a_brief_row_has_a_window_a_side_and_its_block_says_so() -> None:
    pair, evidence = ScriptedPair(), Evidence()
    measured = rounds(pair, evidence, frozenset({1}))
    ratios = [measured.round(index, 1e18) for index in range(12)]
    assert ratios == pytest.approx([np.log(2.0)] * 12)
    orders = {
        index: Counter(block.order for block in evidence.blocks if block.row == KV.rows[index]) for index in (0, 1)
    }
    assert set(orders[0]) == {"ABBA", "BAAB"}
    assert set(orders[1]) == {"AB", "BA"}
    assert Counter(pair.ran) == {
        (0, Side.INCUMBENT): 24,
        (0, Side.CANDIDATE): 24,
        (1, Side.INCUMBENT): 12,
        (1, Side.CANDIDATE): 12,
    }
    for block in evidence.blocks:
        assert len(block.incumbent_ms) == block.order.count("A")
        assert len(block.candidate_ms) == block.order.count("B")
        assert block.log_ratio == pytest.approx(np.log(2.0))


def test_the_first_rounds_of_a_search_are_brief_on_every_row() -> None:
    evidence = Evidence()
    measured = rounds(ScriptedPair(), evidence, frozenset(), brief_rounds=2)
    for index in range(4):
        measured.round(index, 1e18)
    assert [len(block.order) for block in evidence.blocks] == [2, 2, 2, 2, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("candidate_seconds", "hopeless", "windows"),
    [(0.001, None, 6), (0.002, None, 6), (0.004, None, 3), (0.004, 0.5, 2)],
)
def test_what_brief_rounds_left_out_is_looked_at_unless_the_candidate_is_slower(
    candidate_seconds: float, hopeless: float | None, windows: int
) -> None:
    """One that is given up after a round has two windows a row: enough rows of logits for a verdict on them."""
    pair = ScriptedPair({Side.INCUMBENT: 0.002, Side.CANDIDATE: candidate_seconds})
    stopping = Stopping(min_rounds=3, max_rounds=3, hopeless=hopeless)
    rounds(pair, Evidence(), frozenset({1}), brief_rounds=3).until_decided(stopping, 1e18)
    counts = Counter(pair.ran)
    assert counts[(0, Side.CANDIDATE)] == windows
    assert counts[(1, Side.CANDIDATE)] == (1 if hopeless else 3)


def test_a_denominator_has_no_window_beyond_those_that_are_timed() -> None:
    pair = ScriptedPair()
    measured = rounds(pair, Evidence(), frozenset(), brief_rounds=3)
    measured.until_decided(Stopping(min_rounds=3, max_rounds=3), 1e18, look_again=False)
    assert Counter(pair.ran)[(0, Side.CANDIDATE)] == 3


def test_a_closer_look_does_not_miss_the_deadline() -> None:
    """Each window takes a tenth of a second by this clock; after three rounds there is no time for more."""
    pair = ScriptedPair()
    now = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.judge.rounds.time.monotonic", lambda: float(next(now)))
        measured = rounds(pair, Evidence(), frozenset(), brief_rounds=3)
        test = measured.until_decided(Stopping(min_rounds=3, max_rounds=3), 7.5)
    assert len(test.values) == 3
    assert Counter(pair.ran)[(0, Side.CANDIDATE)] == 3


def test_windows_go_where_the_noise_is() -> None:
    """A chunk of 600 ms in one step of a hundred decides little of three decode rows of 60 ms; one in three decides most."""
    windows = [0.12, 0.12, 0.12, 0.6]
    assert long_rows(windows) == {3}
    assert brief_rows([0.33, 0.33, 0.33, 0.01], [0.06, 0.06, 0.06, 0.6], windows) == {3}
    assert brief_rows([0.2, 0.2, 0.2, 0.4], [0.06, 0.06, 0.06, 0.6], windows) == frozenset()
    assert brief_rows([0.5, 0.5], [0.06, 0.05], [0.12, 0.1]) == frozenset()


def test_prompts_and_long_windows_come_last_unless_there_is_nothing_else() -> None:
    decode, prefill, mixed = Phase.DECODE, Phase.PREFILL, Phase.MIXED
    assert late_rows([decode, decode, prefill, mixed], [0.1, 0.5, 0.1, 0.2]) == {1, 2, 3}
    assert late_rows([prefill, prefill], [0.1, 0.5]) == frozenset()


LATE = frozenset({1})


@pytest.mark.parametrize(
    ("candidate_seconds", "alone", "hopeless", "rounds_without"),
    [
        (0.02, 0.002, 0.5, 1),
        (0.02, 0.002, None, 3),  # measured on, without the late row
        (0.02, None, 0.5, 0),  # nobody knows what the late row takes
        (0.02, 2.0, 0.5, 0),  # the late row may make up for it
        (0.002, 0.002, 0.5, 0),
    ],
)
def test_a_late_row_is_left_out_only_where_it_cannot_make_up_for_the_others(
    candidate_seconds: float, alone: float | None, hopeless: float | None, rounds_without: int
) -> None:
    pair, evidence = ScriptedPair({Side.INCUMBENT: 0.002, Side.CANDIDATE: candidate_seconds}), Evidence()
    known = {} if alone is None else {(0, 1): alone}
    measured = rounds(pair, evidence, LATE, brief_rounds=3, late=LATE, alone=known)
    test = measured.until_decided(Stopping(min_rounds=3, max_rounds=3, hopeless=hopeless), 1e18)
    ran = Counter(pair.ran)
    if not rounds_without:
        assert evidence.at_most == []
        assert {block.row for block in evidence.blocks} == set(KV.rows)
        assert ran[(1, Side.CANDIDATE)] >= 1 + len(test.values), "one to warm it, then one a round"
        assert sum(len(block.candidate_ms) for block in evidence.blocks if block.row == KV.rows[1]) == len(test.values)
        return
    shares = [row.steps_share for row in KV.rows]
    bound = (shares[0] * 0.002 + shares[1] * 0.002) / (shares[0] * candidate_seconds)
    assert evidence.at_most == pytest.approx([bound] * rounds_without)
    assert test.decision() == ("hopeless" if hopeless else "slower")
    assert test.mean == pytest.approx(np.log(bound)), "the most that it may be"
    assert {block.row for block in evidence.blocks} == {KV.rows[0]}
    assert not any(ran[(1, side)] for side in Side), "not even for a check"
    assert ran[(0, Side.CANDIDATE)] == max(2, rounds_without), "at least two windows are compared"


def test_the_incumbents_first_window_on_a_late_row_may_compile_and_take_its_time() -> None:
    """Its patience elsewhere is ten times what it takes alone, and two seconds."""
    pair, evidence = ScriptedPair(), Evidence()
    measured = rounds(pair, evidence, LATE, brief_rounds=3, late=LATE, alone={(0, 0): 0.002, (0, 1): 0.002})
    measured.until_decided(Stopping(min_rounds=3, max_rounds=3), 1e18)
    late = [
        deadline
        for (row, side), deadline in zip(pair.ran, pair.deadlines, strict=True)
        if (row, side) == (1, Side.INCUMBENT)
    ]
    assert late[0] == 1e18
    assert len(late) > 1
    assert all(deadline < 1e18 for deadline in late[1:])


def test_rounds_on_a_gpu_that_slows_itself_down_are_measured_again() -> None:
    looks = iter([(), ("hardware slowdown",), ("hardware slowdown",), (), ()])
    pair, evidence = ScriptedPair(), Evidence()
    measured = rounds(pair, evidence, frozenset(), lambda: next(looks))
    ratios = [measured._steady_round(index, 1e18) for index in range(3)]
    assert ratios == pytest.approx([np.log(2.0)] * 3)
    assert [block.round_index for block in evidence.blocks] == [0, 0, 1, 1, 2, 2], "blocks of a repeated round are gone"
    assert len(pair.ran) == 5 * 8, "five rounds ran"


def test_a_gpu_that_does_not_cool_down_is_no_verdict_on_the_candidate() -> None:
    evidence = Evidence()
    measured = rounds(ScriptedPair(), evidence, frozenset(), lambda: ("hardware power brake",))
    with pytest.raises(CandidateFailed, match="hardware power brake in 3 rounds") as caught:
        measured.until_decided(Stopping(min_rounds=3, max_rounds=4), 1e18)
    assert caught.value.failure.kind is FailureKind.DISTURBED
    assert evidence.blocks == []
