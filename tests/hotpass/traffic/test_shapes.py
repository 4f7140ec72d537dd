"""The counting simulation step by step, buckets that keep the cost, and the distance as a metric."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hotpass.errors import InputError
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from hotpass.traffic import Format, Request, Traffic, distance, read_traffic, shape_table
from hotpass.traffic.records import make_traffic
from hotpass.traffic.simulate import StepCounts, count_steps, endless


def request(input_tokens: int, output_tokens: int) -> Request:
    return Request(arrival_ms=0, input_tokens=input_tokens, output_tokens=output_tokens)


def traffic_of(*requests: Request) -> Traffic:
    return make_traffic("test", Format.AZURE, requests, has_clock=False, dropped={})


def entries(counts: StepCounts) -> list[tuple[float, ...]]:
    """(steps, decodes, prefills, query tokens, context total, context max, output tokens) of each entry."""
    columns = (
        counts.steps, counts.decodes, counts.prefills, counts.query_tokens,
        counts.context_total, counts.context_max, counts.output_tokens,
    )  # fmt: skip
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_one_client_one_request() -> None:
    counts = count_steps([request(10, 4)], concurrency=1, chunk_tokens=4)
    assert entries(counts) == [
        (1, 0, 1, 4, 0, 0, 0),
        (1, 0, 1, 4, 4, 4, 0),
        (1, 0, 1, 2, 8, 8, 1),  # the last chunk makes the first token
        (3, 1, 0, 1, 11, 11, 1),  # contexts 10, 11, 12
    ]


def test_prompts_share_a_budget_beside_decoding() -> None:
    counts = count_steps([request(2, 9), request(6, 1), request(3, 2), request(9, 1)], concurrency=3, chunk_tokens=8)
    assert entries(counts)[:2] == [
        (1, 0, 2, 8, 0, 0, 2),  # both whole prompts fill the budget; the second is answered by its one token
        (1, 1, 2, 9, 2, 2, 2),  # the first decodes beside the third's prompt and part of the fourth's
    ]


def test_max_batch_makes_clients_wait() -> None:
    counts = count_steps([request(4, 3)] * 6, concurrency=4, chunk_tokens=64, max_batch=2)
    assert counts.num_seqs.max() == 2
    assert count_steps([request(4, 3)] * 6, concurrency=4, chunk_tokens=64).num_seqs.max() == 4


def naive(requests: list[Request], concurrency: int, chunk: int) -> tuple[float, float, float, float, float]:
    """Steps, output tokens, query tokens, context tokens and the sum of longest contexts, one step at a time."""
    source = endless(requests, random.Random(0))
    running: list[list[int]] = []  # prompt left, in the cache, output left, counts
    unanswered = len(requests)
    steps = outputs = queries = contexts = longest = 0
    while unanswered:
        while len(running) < concurrency:
            item, counts = next(source)
            running.append([item.input_tokens, 0, item.output_tokens, counts])
        budget, step_longest = chunk, 0
        for sequence in running:
            take = min(sequence[0], budget) if sequence[0] else 1
            if not take:
                continue
            contexts, queries, step_longest = contexts + sequence[1], queries + take, max(step_longest, sequence[1])
            sequence[1] += take
            if sequence[0]:
                budget -= take
                sequence[0] -= take
            if not sequence[0]:
                sequence[2] -= 1
                outputs += 1
        unanswered -= sum(sequence[3] for sequence in running if not sequence[2])
        running = [sequence for sequence in running if sequence[2]]
        longest += step_longest
        steps += 1
    return steps, outputs, queries, contexts, longest


@pytest.mark.parametrize(("seed", "concurrency"), itertools.product(range(3), [1, 3, 7]))
def test_agrees_with_counting_every_step(seed: int, concurrency: int) -> None:
    draw = random.Random(seed)
    requests = [request(draw.randint(1, 60), draw.randint(1, 30)) for _ in range(60)]
    counts = count_steps(requests, concurrency=concurrency, chunk_tokens=16)
    columns = (counts.output_tokens, counts.query_tokens, counts.context_total, counts.context_max)
    assert (counts.steps.sum(), *(counts.steps @ column for column in columns)) == naive(requests, concurrency, 16)


def test_the_batch_stays_full_until_the_end() -> None:
    requests = [request(4, 50), *[request(4, 2)] * 5]
    counts = count_steps(requests, concurrency=3, chunk_tokens=512)
    assert counts.num_seqs.min() == 3


def test_table_of_one_request() -> None:
    table = shape_table(traffic_of(request(8, 3)), 1, chunk_tokens=4)
    assert table.num_steps == 4
    assert table.output_tokens_per_step == 0.75
    assert [(row.key, row.steps_share, row.tokens_share) for row in table.rows] == [
        ("decode n1 q1 c8", 0.5, pytest.approx(2 / 3)),
        ("prefill n1 q4 c2", 0.5, pytest.approx(1 / 3)),
    ]


@pytest.mark.parametrize(("name", "concurrency"), list(itertools.product(["chat", "code", "long-context"], [1, 4, 16])))
def test_rows_keep_shares_and_costs(name: str, concurrency: int) -> None:
    traffic = read_traffic(name)
    counts = count_steps(traffic.requests, concurrency=concurrency, chunk_tokens=512)
    table = shape_table(traffic, concurrency)
    assert 1 <= len(table.rows) <= 6
    assert sum(row.steps_share for row in table.rows) == pytest.approx(1.0)
    assert sum(row.tokens_share for row in table.rows) == pytest.approx(1.0)
    steps = counts.steps / counts.steps.sum()
    for exact, kept in (
        (steps @ counts.query_tokens, sum(row.steps_share * row.query_tokens for row in table.rows)),
        (steps @ counts.context_total, sum(row.steps_share * row.num_seqs * row.context_mean for row in table.rows)),
    ):
        assert kept == pytest.approx(exact, rel=0.05)
    for row in table.rows:
        assert row.context_max >= row.context_mean
        assert row.query_tokens == row.num_seqs if row.phase is Phase.DECODE else row.query_tokens > row.num_seqs


def test_more_rows_describe_steps_better() -> None:
    counts = count_steps(read_traffic("chat").requests, concurrency=4, chunk_tokens=512)
    contexts = counts.context_total / counts.num_seqs

    def error(max_rows: int) -> float:
        table = shape_table(read_traffic("chat"), 4, max_rows=max_rows)
        decode = [row.context_mean for row in table.rows if row.phase is Phase.DECODE]
        near = np.abs(contexts[:, None] - np.array(decode)).min(axis=1)[counts.prefills == 0]
        return float(near @ counts.steps[counts.prefills == 0])

    assert error(10) < error(5) < error(2)


def test_a_phase_that_hardly_occurs_has_no_row() -> None:
    table = shape_table(read_traffic("chat"), 8)
    assert {row.phase for row in table.rows} == {Phase.DECODE, Phase.MIXED}


def test_refused_arguments() -> None:
    traffic = traffic_of(request(8, 3))
    with pytest.raises(InputError, match="concurrency '0'"):
        shape_table(traffic, 0)
    with pytest.raises(InputError, match="max_rows '1' is fewer than the 2 phases"):
        shape_table(traffic, 1, max_rows=1)


def table_of(*rows: tuple[Phase, int, int, int, float]) -> ShapeTable:
    return ShapeTable(
        rows=tuple(
            ShapeRow(
                phase=phase, num_seqs=seqs, query_tokens=query, context_mean=context, context_max=context,
                steps_share=share, tokens_share=share,
            )
            for phase, seqs, query, context, share in rows
        ),
        concurrency=1, chunk_tokens=512, num_steps=100, output_tokens_per_step=1.0,
    )  # fmt: skip


DECODE = table_of((Phase.DECODE, 1, 1, 256, 1.0))
PREFILL = table_of((Phase.PREFILL, 1, 512, 0, 1.0))


def test_distance_by_hand() -> None:
    assert distance(DECODE, DECODE) == 0.0
    assert distance(DECODE, PREFILL) == 1.0
    half = table_of((Phase.DECODE, 1, 1, 256, 0.5), (Phase.PREFILL, 1, 512, 0, 0.5))
    assert distance(DECODE, half) == pytest.approx(0.5)
    assert distance(DECODE, table_of((Phase.DECODE, 2, 2, 256, 1.0))) == pytest.approx(2 / 8)
    assert distance(DECODE, table_of((Phase.DECODE, 1, 1, 768, 1.0))) == pytest.approx(1 / 8)


def test_distance_moves_to_the_nearest_rows() -> None:
    a = table_of((Phase.DECODE, 1, 1, 256, 0.5), (Phase.DECODE, 4, 4, 256, 0.5))
    b = table_of((Phase.DECODE, 4, 4, 256, 0.6), (Phase.DECODE, 1, 1, 256, 0.4))
    assert distance(a, b) == pytest.approx(0.1 * 4 / 8)


def test_distance_is_a_metric() -> None:
    draw = random.Random(5)

    def anything() -> ShapeTable:
        shares = [draw.random() for _ in range(draw.randint(1, 5))]
        rows = []
        for share in shares:
            seqs = draw.choice([1, 2, 3, 8])
            phase = draw.choice([Phase.DECODE, Phase.PREFILL])
            query = seqs if phase is Phase.DECODE else draw.choice([64, 512])
            rows.append((phase, seqs, query, draw.choice([0, 256, 1024, 5000]), share / sum(shares)))
        return table_of(*rows)

    for _ in range(200):
        a, b, c = anything(), anything(), anything()
        assert 0.0 <= distance(a, b) <= 1.0
        assert distance(a, b) == pytest.approx(distance(b, a), abs=1e-9)
        assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9
        assert distance(a, a) == pytest.approx(0.0, abs=1e-9)


def test_other_traffic_is_further_than_other_rows() -> None:
    chat = read_traffic("chat")
    assert distance(shape_table(chat, 4), shape_table(chat, 4, max_rows=12)) < 0.06
    assert distance(shape_table(chat, 4), shape_table(read_traffic("code"), 4)) > 0.3
