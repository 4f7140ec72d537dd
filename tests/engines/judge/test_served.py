"""Which of the served tokens are looked at."""

from __future__ import annotations

import random

from engines.judge.served import CHECKED_TOKENS, sampled_places


def test_the_first_and_the_last_token_are_always_looked_at() -> None:
    for count in (1, 2, 3, 4, 5, 200):
        places = sampled_places(count, random.Random(count))
        assert places == sorted(set(places))
        assert (places[0], places[-1]) == (0, count - 1)
        assert len(places) == min(count, CHECKED_TOKENS)


def test_the_others_are_chance() -> None:
    assert len({tuple(sampled_places(50, random.Random(seed))) for seed in range(20)}) > 10
