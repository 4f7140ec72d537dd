"""Whose time it was that ran out: the candidate's, or that of the incumbent beside it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest

from engines.judge.disturbance import (
    WAIT_SECONDS,
    Alone,
    Disturbance,
    behind_a_timeout,
    disturbance,
    of_the_incumbent,
    patience_seconds,
)
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


OTHER: Place = (0, 1)
STEADY = [0.99, 1.0, 1.01, 1.0]


def measured(
    incumbent: dict[Place, list[float]], candidate: list[float], *groups: list[float], noise_floor: float = 0.0
) -> Disturbance:
    """Of windows beside a candidate and its own on each place, and of groups of windows without it."""
    evidence, alone = Evidence(incumbent_seconds=incumbent), Alone()
    evidence.candidate_seconds = dict.fromkeys(incumbent, candidate)
    for group in groups:
        alone.add(dict.fromkeys(incumbent, group))
    return disturbance(evidence, alone, {PLACE: 0.75, OTHER: 0.25}, noise_floor)


def test_in_the_way_of_two_windows_in_five_is_seen_as_much_as_it_adds_to_the_speed() -> None:
    beside = [1.0, 1.5, 1.0, 1.5, 1.0, 1.0, 1.5, 1.0, 1.5, 1.0]
    found = measured({PLACE: beside}, 2 * STEADY, 2 * STEADY)
    assert statistics.median(beside) == 1.0, "the windows' median shows nothing"
    blocks = statistics.geometric_mean(beside) / statistics.geometric_mean(STEADY)
    assert found.ratio == pytest.approx(blocks, rel=1e-3)
    assert found.ratio == pytest.approx(1.5**0.4, rel=1e-3)
    assert found.low is not None
    assert found.low > 1.15


def test_places_count_by_their_share_of_the_time() -> None:
    found = measured({PLACE: [1.0, 1.0], OTHER: [3.0, 3.0]}, STEADY, STEADY)
    assert found.ratio == pytest.approx(0.75 * 1.0 + 0.25 * 3.0, rel=1e-3)


def test_an_unsteady_machine_shows_in_the_windows_that_no_disturbance_is_in() -> None:
    beside, unsteady = [1.0, 1.0, 1.6, 1.0, 1.6, 1.0], [1.0, 1.7, 1.0, 1.0, 1.6, 1.0]
    assert (measured({PLACE: beside}, STEADY, STEADY).low or 0.0) > 1.0
    for found in (measured({PLACE: beside}, unsteady, STEADY), measured({PLACE: beside}, STEADY, STEADY + unsteady)):
        assert found.low is not None
        assert found.low < 1.0
    floor = measured({PLACE: beside}, STEADY, STEADY, noise_floor=0.3)
    assert (floor.ratio, (floor.low or 9.0) < 1.0) == (measured({PLACE: beside}, STEADY, STEADY).ratio, True)


def test_a_machine_that_became_slower_is_as_slow_afterwards() -> None:
    """And what differs between before and after counts as noise."""
    found = measured({PLACE: [1.3] * 6}, [1.3] * 6, STEADY, [1.29, 1.31])
    assert found.ratio == pytest.approx(1.0, abs=0.01)
    assert (found.low or 9.0) < 0.9


def test_nothing_is_known_without_windows_of_both_kinds() -> None:
    assert measured({PLACE: [5.0]}, STEADY) == Disturbance() == measured({}, STEADY, STEADY)


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
