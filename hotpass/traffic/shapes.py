"""The shape table of traffic: counted steps in at most a handful of representative rows, and how far two tables are apart.

Rows are made by splitting: one bucket a phase at first, then again and again the bucket that mixes the most unlike steps is
cut in two, at the border that helps most. Unlikeness is the squared distance of logarithms of (sequences, query tokens,
context), weighted by what steps cost. A row's sequences, query tokens and context are the means of its steps, so the total of
every cost that is linear in them is kept, up to rounding to whole numbers. Deterministic, and free of any clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotpass.errors import InputError
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from hotpass.traffic.records import Traffic
from hotpass.traffic.simulate import StepCounts, count_steps

Floats = npt.NDArray[np.float64]

WEIGHT_EQUIVALENT_TOKENS = 64
"""Query tokens that cost as much as streaming the weights once: between a CPU (about 25) and a GPU (about 250). It decides
only where buckets are cut, never what a row says."""
CONTEXT_EQUIVALENT = 32_768
"""Tokens of context, over all sequences, that cost as much as streaming the weights once; used as the one above."""
CONTEXT_FLOOR = 256
"""Contexts well below this are alike: attention is a small part of the step there."""
NEGLIGIBLE_COST = 0.005
"""A phase with less than this share of the cost has no row, and shares are of the other steps: a loop's start-up, mostly."""
ALIKE = 1e-3
"""A cut that removes less unlikeness than this (squared octaves, of all cost) is not made."""
FAR_OCTAVES = 8.0
"""Steps that differ by so many doublings, over all three facts, are wholly unlike (`distance`)."""


def shape_table(
    traffic: Traffic,
    concurrency: int,
    *,
    chunk_tokens: int = 512,
    max_batch: int = 0,
    max_rows: int = 6,
    seed: int = 0,
) -> ShapeTable:
    """The steps that a closed loop of `concurrency` clients makes of this traffic, in at most `max_rows` rows, the most
    frequent first. `max_batch` 0 is the concurrency. `seed` draws the requests that keep the batch full at the end.
    Raises InputError."""
    for name, value, least in (
        ("concurrency", concurrency, 1),
        ("chunk_tokens", chunk_tokens, 1),
        ("max_batch", max_batch, 0),
    ):
        if value < least:
            raise InputError(name, value, "is not possible", f"give a whole number of at least {least}")
    counts = count_steps(
        traffic.requests, concurrency=concurrency, chunk_tokens=chunk_tokens, max_batch=max_batch, seed=seed
    )
    num_steps, output_tokens = float(counts.steps.sum()), float(counts.steps @ counts.output_tokens)
    return ShapeTable(
        rows=bucket(counts, max_rows),
        concurrency=concurrency,
        chunk_tokens=chunk_tokens,
        num_steps=int(num_steps),
        output_tokens_per_step=output_tokens / num_steps,
    )


def bucket(counts: StepCounts, max_rows: int) -> tuple[ShapeRow, ...]:
    """At most `max_rows` rows; every phase that matters has one. Raises InputError when there are more of these than rows."""
    phases = np.where(counts.prefills == 0, 0, np.where(counts.decodes == 0, 1, 2))
    weights = counts.steps * (
        1 + counts.query_tokens / WEIGHT_EQUIVALENT_TOKENS + counts.context_total / CONTEXT_EQUIVALENT
    )
    cost = np.bincount(phases, weights, minlength=3) / weights.sum()
    present = np.flatnonzero(cost >= NEGLIGIBLE_COST)
    if len(present) > max_rows:
        raise InputError(
            "max_rows", max_rows, f"is fewer than the {len(present)} phases of this traffic", "give at least 3"
        )
    features = np.stack(
        [
            np.log2(counts.num_seqs),
            np.log2(counts.query_tokens),
            np.log2(CONTEXT_FLOOR + counts.context_total / counts.num_seqs),
        ]
    )
    buckets = [np.flatnonzero(phases == phase) for phase in present]
    cuts = [_best_cut(features[:, members], weights[members]) for members in buckets]
    while len(buckets) < max_rows:
        index = max(range(len(cuts)), key=lambda i: cuts[i].gain)
        if cuts[index].gain <= ALIKE * weights.sum():
            break
        members, cut = buckets.pop(index), cuts.pop(index)
        below = features[cut.feature, members] <= cut.border
        for part in (members[below], members[~below]):
            buckets.append(part)
            cuts.append(_best_cut(features[:, part], weights[part]))
    names = (Phase.DECODE, Phase.PREFILL, Phase.MIXED)
    used = np.concatenate(buckets)
    num_steps, num_outputs = counts.steps[used].sum(), counts.steps[used] @ counts.output_tokens[used]
    rows = [
        _row(counts, members, names[int(phases[members[0]])], float(num_steps), float(num_outputs))
        for members in buckets
    ]
    return tuple(sorted(rows, key=lambda row: -row.steps_share))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where to cut a bucket in two, and how much unlikeness that removes."""

    gain: float
    feature: int
    border: float


def _best_cut(features: Floats, weights: Floats) -> _Cut:
    """The best border on the best feature: features [F, M], weights [M]."""
    best = _Cut(0.0, 0, 0.0)
    total = weights.sum()
    for index, values in enumerate(features):
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        borders = np.flatnonzero(np.diff(ordered) > 1e-12)
        if not len(borders):
            continue
        weight = np.cumsum(weights[order])[borders]
        between = np.zeros(len(borders))
        for other in features:
            left = np.cumsum(weights[order] * other[order])
            mean_left, mean_right = left[borders] / weight, (left[-1] - left[borders]) / (total - weight)
            between += weight * (total - weight) / total * (mean_left - mean_right) ** 2
        top = int(np.argmax(between))
        if between[top] > best.gain:
            at = borders[top]
            best = _Cut(float(between[top]), index, float((ordered[at] + ordered[at + 1]) / 2))
    return best


def _row(
    counts: StepCounts, members: npt.NDArray[np.intp], phase: Phase, all_steps: float, all_outputs: float
) -> ShapeRow:
    """The representative of a bucket."""
    steps = counts.steps[members]
    num_steps = float(steps.sum())
    seqs_total = float(steps @ counts.num_seqs[members])
    num_seqs = max(2 if phase is Phase.MIXED else 1, round(seqs_total / num_steps))
    query_tokens = max(
        num_seqs + (phase is Phase.MIXED), round(float(steps @ counts.query_tokens[members]) / num_steps)
    )
    context_mean = round(float(steps @ counts.context_total[members]) / seqs_total)
    context_max = max(context_mean, round(float(steps @ counts.context_max[members]) / num_steps))
    return ShapeRow(
        phase=phase,
        num_seqs=num_seqs,
        query_tokens=num_seqs if phase is Phase.DECODE else query_tokens,
        context_mean=context_mean,
        context_max=context_mean if num_seqs == 1 else context_max,
        steps_share=num_steps / all_steps,
        tokens_share=float(steps @ counts.output_tokens[members]) / all_outputs,
    )


def distance(a: ShapeTable, b: ShapeTable) -> float:
    """How far two tables are apart: 0 for equal mixes of steps, 1 for mixes without anything alike.

    The earth mover's distance between rows weighted by `steps_share`. Two rows of different phases are 1 apart; rows of one
    phase by the doublings between their sequences, query tokens and contexts, added up, ÷ 8, at most 1. That is a metric,
    so this is one too: cutting the same steps into other rows costs no more than the rows differ.
    """
    cost = [[_row_distance(p, q) for q in b.rows] for p in a.rows]
    return _earth_mover([row.steps_share for row in a.rows], [row.steps_share for row in b.rows], cost)


def _row_distance(a: ShapeRow, b: ShapeRow) -> float:
    if a.phase != b.phase:
        return 1.0
    pairs = (
        (a.num_seqs, b.num_seqs),
        (a.query_tokens, b.query_tokens),
        (a.context_mean + CONTEXT_FLOOR, b.context_mean + CONTEXT_FLOOR),
    )
    return min(1.0, sum(abs(math.log2(x / y)) for x, y in pairs) / FAR_OCTAVES)


def _earth_mover(supply: Sequence[float], demand: Sequence[float], cost: Sequence[Sequence[float]]) -> float:
    """Least cost of moving supply to demand (each sums to 1): cheapest augmenting paths, since tables have a few rows."""
    left, right = list(supply), list(demand)
    flow = [[0.0] * len(right) for _ in left]
    moved = 0.0
    while max(left) > 1e-12 and max(right) > 1e-12:
        path = _cheapest_path(left, right, flow, cost)
        forward, backward = path[0::2], path[1::2]
        amount = min([left[path[0][0]], right[path[-1][1]], *(flow[i][j] for i, j in backward)])
        for i, j in forward:
            flow[i][j] += amount
            moved += amount * cost[i][j]
        for i, j in backward:
            flow[i][j] -= amount
            moved -= amount * cost[i][j]
        left[path[0][0]] -= amount
        right[path[-1][1]] -= amount
    return min(1.0, max(0.0, moved))


def _cheapest_path(
    left: Sequence[float], right: Sequence[float], flow: Sequence[Sequence[float]], cost: Sequence[Sequence[float]]
) -> list[tuple[int, int]]:
    """Edges of the cheapest path from a row with supply to one with demand: forward edges at even places, flow undone at odd
    ones. Bellman-Ford over the residual graph."""
    from_left = [0.0 if amount > 1e-12 else math.inf for amount in left]
    to_right = [math.inf] * len(right)
    before_left: list[int | None] = [None] * len(left)
    before_right = [0] * len(right)
    for _ in range(len(left) + len(right)):
        for i, start in enumerate(from_left):
            for j in range(len(right)):
                if start + cost[i][j] < to_right[j] - 1e-15:
                    to_right[j], before_right[j] = start + cost[i][j], i
        for j, reached in enumerate(to_right):
            for i in range(len(left)):
                if flow[i][j] > 1e-12 and reached - cost[i][j] < from_left[i] - 1e-15:
                    from_left[i], before_left[i] = reached - cost[i][j], j
    end = min((j for j, amount in enumerate(right) if amount > 1e-12), key=lambda j: to_right[j])
    path: list[tuple[int, int]] = []
    at: int | None = end
    while at is not None:
        i = before_right[at]
        path.append((i, at))
        at = before_left[i]
        if at is not None:
            path.append((i, at))
    return path[::-1]
