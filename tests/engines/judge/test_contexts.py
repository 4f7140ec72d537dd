"""Which context is computed where: each text once, in a row whose slots are long enough."""

from __future__ import annotations

from engines.judge.contexts import computed_in, longest_contexts


def test_each_sequence_takes_the_longest_of_its_place() -> None:
    lengths = [(40, 20), (30, 30, 10), (50,)]
    assert longest_contexts(lengths) == [50, 30, 10]
    assert computed_in(lengths) == {2: [0], 1: [1, 2]}


def test_rows_without_context_need_none() -> None:
    assert longest_contexts([(0,), (0, 0)]) == [0, 0]
    assert computed_in([(0,), (0, 0)]) == {0: [0], 1: [1]}
