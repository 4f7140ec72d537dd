"""Input sets: each at most once an attempt, the candidate before the incumbent, in an order that depends on a secret."""

from __future__ import annotations

import random

import numpy as np

from engines.judge.inputs import InputSet, RandomTokens, drawer, seed_of, window_tokens
from engines.program import KvPlan
from tests.engines.conftest import ROWS


def pool(count: int) -> list[InputSet]:
    return [InputSet(tokens=np.full((1, 2), index)) for index in range(count)]


def fresh() -> np.ndarray:
    return np.full((1, 2), -1)


def test_every_set_is_drawn_once_then_fresh_ones_follow() -> None:
    drawn = drawer(pool(4), fresh, random.Random(1))
    assert sorted(int(drawn.for_candidate().tokens[0, 0]) for _ in range(4)) == [0, 1, 2, 3]
    assert drawn.for_candidate().tokens[0, 0] == -1


def test_the_order_is_the_seeds() -> None:
    def order(seed: int) -> list[int]:
        drawn = drawer(pool(8), fresh, random.Random(seed))
        return [int(drawn.for_candidate().tokens[0, 0]) for _ in range(8)]

    assert order(1) == order(1) != order(2)


def test_the_incumbent_gets_only_what_the_candidate_has_answered() -> None:
    drawn = drawer(pool(2), fresh, random.Random(1))
    assert drawn.for_incumbent().tokens[0, 0] == -1
    first = drawn.for_candidate()
    assert drawn.for_incumbent().tokens[0, 0] == -1
    drawn.answered.append(first)
    assert drawn.for_incumbent() is first
    assert drawn.for_incumbent().tokens[0, 0] == -1


def test_answers_of_one_attempt_do_not_reach_the_next() -> None:
    sets = pool(1)
    sets[0].reference = np.ones(1)
    first = drawer(sets, fresh, random.Random(1)).for_candidate()
    first.candidate = np.zeros(1)
    again = drawer(sets, fresh, random.Random(1)).for_candidate()
    assert again.candidate is None
    assert again.reference is sets[0].reference


def test_windows_have_the_rows_shape_and_tokens_of_the_vocabulary() -> None:
    plan = KvPlan(rows=ROWS, steps_per_window=(3, 2), serving_slots=1, serving_context=8)
    source = RandomTokens(50, 0)
    assert window_tokens(source, plan, 0).shape == (3, 2)
    tokens = window_tokens(source, plan, 1)
    assert tokens.shape == (2, 8)
    assert 0 <= tokens.min() <= tokens.max() < 50


def test_seeds_differ_by_every_part() -> None:
    assert len({seed_of(1, "a"), seed_of(1, "b"), seed_of(2, "a"), seed_of("1", "a")}) == 4
    assert 0 <= seed_of(1) < 1 << 63
