"""Whose time it was that ran out: the candidate's, or that of the incumbent beside it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest

from engines.judge.disturbance import WAIT_SECONDS, behind_a_timeout, of_the_incumbent, patience_seconds, share_slower
from engines.judge.inputs import RandomTokens, drawer, window_tokens
from engines.judge.rounds import Evidence, Place, Plan, Rounds
from engines.judge.windows import Window
from engines.program import CandidateFailed, KvPlan
from hotpass.records.measurement import Failure, FailureKind, Side
from tests.engines.conftest import ROWS

TIMEOUT = Failure(kind=FailureKind.TIMEOUT, message="no reply by the deadline", detail="said last")
CRASH = Failure(kind=FailureKind.CRASH, message="SIGSEGV")
KV = KvPlan(rows=ROWS[:1], steps_per_window=(2,), serving_slots=0, serving_context=0)
PLACE: Place = (0, 0)


class ScriptedPair:
    """The candidate answers at once; the incumbent takes what it is told to, or fails."""

    keeps_both = True

    def __init__(self, incumbent: float | Failure) -> None:
        self.incumbent = incumbent
        self.waits: dict[Side, list[float]] = {side: [] for side in Side}
        """Seconds until the deadline of each window."""

    def window(self, side: Side, cut: int, row: int, tokens: np.ndarray, deadline: float) -> Window:
        self.waits[side].append(deadline - time.monotonic())
        seconds: float | Failure = 0.1 if side is Side.CANDIDATE else self.incumbent
        if isinstance(seconds, Failure):
            raise CandidateFailed(seconds)
        logits = np.ones((len(tokens), 2, 4), np.float32)
        return Window(seconds=seconds, child_seconds=seconds, logits=logits, activation={})


def run_round(pair: ScriptedPair, alone: Mapping[Place, float]) -> Evidence:
    rng, evidence = random.Random(1), Evidence()
    plan = Plan(
        kv=KV,
        depths={0: 1},
        places=[PLACE],
        drawers={PLACE: drawer((), partial(window_tokens, RandomTokens(9, 1), KV, 0), rng)},
        noise_abs=0.0,
        incumbent_is_loaded=True,
        alone_seconds=alone,
    )
    Rounds(pair, plan, evidence, rng).round(0, time.monotonic() + 1000.0)  # type: ignore[arg-type]
    return evidence


def test_the_incumbent_is_waited_for_by_what_it_takes_beside_itself() -> None:
    pair = ScriptedPair(1.5)
    evidence = run_round(pair, {PLACE: 0.5})
    assert max(pair.waits[Side.INCUMBENT]) <= patience_seconds(2 * 0.5) == WAIT_SECONDS + 10
    assert min(pair.waits[Side.CANDIDATE]) > 900
    assert evidence.incumbent_lost_seconds == pytest.approx(2 * (1.5 - 2 * 0.5))


def test_without_knowledge_of_its_time_it_has_until_the_deadline() -> None:
    pair = ScriptedPair(1.5)
    assert run_round(pair, {}).incumbent_lost_seconds == 0.0
    assert min(pair.waits[Side.INCUMBENT]) > 900


@pytest.mark.parametrize(
    ("failure", "alone_step", "kind"),
    [
        (TIMEOUT, 1e-12, FailureKind.DISTURBED),
        (TIMEOUT, 100.0, FailureKind.TIMEOUT),
        (CRASH, 1e-12, FailureKind.CRASH),
    ],
    ids=["starved", "the deadline came first", "a crash is a crash"],
)
def test_a_starved_incumbent_is_a_disturbance(failure: Failure, alone_step: float, kind: FailureKind) -> None:
    with pytest.raises(CandidateFailed) as caught:
        run_round(ScriptedPair(failure), {PLACE: alone_step})
    assert caught.value.failure.kind is kind
    assert caught.value.failure.detail == failure.detail
    assert (ROWS[0].key in caught.value.failure.message) == (kind is FailureKind.DISTURBED)


def test_the_share_of_slower_windows_is_by_pairs_within_a_place() -> None:
    other: Place = (0, 1)
    assert share_slower({PLACE: [2.0, 1.0]}, {PLACE: [1.0, 3.0]}) == (1 + 0 + 0.5 + 0) / 4
    assert share_slower({PLACE: [5.0], other: [1.0]}, {PLACE: [1.0], other: [5.0]}) == 0.5
    assert share_slower({PLACE: [5.0]}, {}) == 1.0


def test_what_it_waited_and_what_it_takes_are_told() -> None:
    told = of_the_incumbent(TIMEOUT, "a replay", 12.34, 0.5)
    assert told.message == "a replay had not ended after 12.3 s, beside itself it takes 0.500 s"


@pytest.mark.parametrize(
    ("failure", "lost", "kind"),
    [
        (TIMEOUT, 16.0, FailureKind.DISTURBED),
        (TIMEOUT, 15.0, FailureKind.TIMEOUT),
        (CRASH, 29.0, FailureKind.CRASH),
    ],
)
def test_a_timeout_is_blamed_on_who_lost_the_time(failure: Failure, lost: float, kind: FailureKind) -> None:
    assert behind_a_timeout(failure, lost, 30.0).kind is kind
