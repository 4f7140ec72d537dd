"""The best plans played event by event (`costmodel.simulate`), from their own step times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodel.grid import Grid
from costmodel.operators import Layout, step
from costmodel.records import Asked, Plan
from costmodel.simulate import StepTimes, simulate

Floats = NDArray[np.float64]

SIMULATED = 50
"""Plans that are played."""


def simulated_plans(chosen: list[Plan], grid: Grid, asked: Asked) -> list[Plan]:
    """The best aggregated plans played event by event; their simulated figures beside the analytic ones."""
    played = [made for made in chosen if made.prefill_index is None][:SIMULATED]
    if not played:
        return chosen
    times = _step_times([made.index for made in played], grid, asked)
    by_name = {}
    for made, steps in zip(played, times, strict=True):
        group = max(1, round(made.concurrency / made.layout["dp"]))
        free = grid.machine.memory_bytes - float(grid.memory.weights[made.index] + grid.memory.working[made.index])
        per_token = float(grid.memory.cache[made.index]) / group / (grid.load.input_tokens + grid.load.output_tokens)
        found = simulate(
            asked.played(grid.load, max(2 * group, min(4 * group, 64))), steps, cache_tokens=int(free / per_token), max_batch=group,
            chunk_tokens=asked.chunk_tokens, clients=group, block_tokens=asked.block_tokens,
        )  # fmt: skip
        groups = made.layout["dp"] * made.replicas
        good = found.goodput((asked.slo_ttft_ms or np.inf) / 1e3, (asked.slo_tpot_ms or np.inf) / 1e3) * groups
        by_name[made.name] = replace(
            made,
            simulated={
                "ttft_p50_ms": float(np.median(found.ttft_s)) * 1e3,
                "ttft_p99_ms": float(np.quantile(found.ttft_s, 0.99)) * 1e3,
                "tpot_p50_ms": float(np.median(found.tpot_s)) * 1e3,
                "tpot_p99_ms": float(np.quantile(found.tpot_s, 0.99)) * 1e3,
                "goodput_per_gpu": good / made.gpus,
                "cache_use": found.peak_cache_tokens / max(int(free / per_token), 1),
                "preemptions": float(found.preemptions),
                "cached_tokens": float(found.cached_tokens),
                "refused": float(found.refused),
            },
        )
    return [by_name.get(made.name, made) for made in chosen]


def _step_times(indices: list[int], grid: Grid, asked: Asked) -> list[StepTimes]:
    """Step times of these points on a grid of batches and contexts, all in two passes through the operators."""
    whole = grid.load.input_tokens + grid.load.output_tokens
    most = max(float(grid.concurrency[i] / grid.layout.dp[i]) for i in indices)
    batches = np.unique(np.geomspace(1, max(most, 2), 8).round())
    contexts = np.unique(np.geomspace(max(grid.load.input_tokens / 2, 16), 2 * whole, 5).round())
    chunks = np.unique(np.geomspace(16, max(asked.chunk_tokens, 32), 8).round())
    b, c = (a.ravel() for a in np.meshgrid(batches, contexts, indexing="ij"))
    size, many = len(b), len(indices)
    layout = grid.layout.take(np.repeat(np.array(indices), size))
    decode = _decode_seconds(grid, layout, np.tile(b, many), np.tile(c, many)).reshape(
        many, len(batches), len(contexts)
    )
    again = grid.layout.take(np.repeat(np.array(indices), len(chunks)))
    prefill = _prefill_seconds(grid, again, np.tile(chunks, many)).reshape(many, len(chunks))
    return [
        StepTimes(
            batches=batches,
            contexts=contexts,
            decode_s=decode[n],
            chunks=chunks,
            prefill_s=prefill[n] / grid.layout.pp[i],
        )
        for n, i in enumerate(indices)
    ]


def _decode_seconds(grid: Grid, layout: Layout, batch: Floats, context: Floats) -> Floats:
    each = np.maximum(batch / layout.pp, 1.0)
    return step(
        grid.graph,
        layout,
        grid.source,
        decode=True,
        sequences=each,
        tokens=np.ones_like(each),
        past=context,
        kv_bytes=grid.kv_bytes,
    ).seconds


def _prefill_seconds(grid: Grid, layout: Layout, tokens: Floats) -> Floats:
    one = np.ones_like(tokens)
    return step(
        grid.graph,
        layout,
        grid.source,
        decode=False,
        sequences=one,
        tokens=tokens,
        past=0 * one,
        kv_bytes=grid.kv_bytes,
    ).seconds
