"""Statistics of traffic, under the definitions that public trace statistics use. Numbers are exact; rounding is for whoever prints.

Lengths: linear-interpolated percentiles. Arrivals: population standard deviations, windows counted from the first arrival,
the last and partial window included. Cache: a block hits when it and all blocks before it in its prompt were seen earlier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotpass.traffic.records import Request, Traffic

PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99)
WINDOWS_SECONDS = (1, 10, 60)
LRU_CAPACITIES_BLOCKS = (500, 2_000, 5_000, 10_000, 30_000, 100_000)


def summarize(traffic: Traffic) -> dict[str, Any]:
    """`input`, `output`, `arrival` (when there is a clock), `cache` and `lru_token_hit_by_capacity_Mtok` (when there are
    prefix hashes), `dropped` by reason. Units are in the names; `rps` is requests per second."""
    requests = traffic.requests
    summary: dict[str, Any] = {
        "rows": len(requests),
        "input": _lengths([request.input_tokens for request in requests]),
        "output": _lengths([request.output_tokens for request in requests]),
    }
    if traffic.has_clock and len(requests) > 1 and requests[-1].arrival_ms > requests[0].arrival_ms:
        summary["arrival"] = _arrivals(np.array([request.arrival_ms for request in requests]) / 1000.0)
    if any(request.prefix_hashes for request in requests):
        summary["cache"] = _cache(requests)
        block_tokens = max(request.block_tokens for request in requests)
        summary["lru_token_hit_by_capacity_Mtok"] = {
            f"{round(capacity * block_tokens / 1e6, 2):g}": lru_token_hit(requests, capacity)
            for capacity in LRU_CAPACITIES_BLOCKS
        } | {"inf": summary["cache"]["ideal_prefix_hit_tokens"]}
    summary["dropped"] = {reason: {"requests": d.requests, "tokens": d.tokens} for reason, d in traffic.dropped.items()}
    return summary


def lru_token_hit(requests: Sequence[Request], capacity_blocks: int) -> float:
    """Share of prompt tokens found in a least-recently-used cache of so many blocks, requests in order.

    A prompt looks its leading blocks up, then all its blocks are touched from first to last, each new one pushing out the oldest.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for request in requests:
        hit_tokens += _tokens_of(request, _leading(request, cache))
        for block in request.prefix_hashes:
            if block in cache:
                cache.move_to_end(block)
                continue
            cache[block] = None
            if len(cache) > capacity_blocks:
                cache.popitem(last=False)
    return hit_tokens / sum(request.input_tokens for request in requests)


def _lengths(values: Sequence[int]) -> dict[str, float]:
    array = np.array(values, dtype=np.float64)
    percentiles = np.percentile(array, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"n": len(values), "mean": float(array.mean()), **named, "max": float(array.max())}


def _arrivals(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    seconds = seconds - seconds[0]
    gaps = np.diff(seconds)
    span = float(seconds[-1])
    counts = {window: np.bincount((seconds // window).astype(np.int64)) for window in WINDOWS_SECONDS}
    dispersion = {f"idx_disp_{w}s": float(counts[w].var() / counts[w].mean()) for w in WINDOWS_SECONDS}
    return {
        "span_s": span,
        "rate_rps": len(seconds) / span,
        "cv_interarrival": float(gaps.std() / gaps.mean()),
        **dispersion,
        "peak_1s": int(counts[1].max()),
        "peak_60s_rps": float(counts[60].max() / 60),
        "zero_gap_frac": float((gaps == 0).mean()),
    }


def _cache(requests: Sequence[Request]) -> dict[str, float]:
    seen: set[int] = set()
    blocks = hit_blocks = hit_tokens = long_hits = 0
    for request in requests:
        leading = _leading(request, seen)
        seen.update(request.prefix_hashes)
        blocks += len(request.prefix_hashes)
        hit_blocks += leading
        hit_tokens += _tokens_of(request, leading)
        long_hits += leading > 1
    return {
        "blocks": blocks,
        "unique_blocks": len(seen),
        "ideal_prefix_hit_blocks": hit_blocks / blocks,
        "ideal_prefix_hit_tokens": hit_tokens / sum(request.input_tokens for request in requests),
        "frac_req_hit_gt1block": long_hits / len(requests),
    }


def _leading(request: Request, known: set[int] | OrderedDict[int, None]) -> int:
    """Leading blocks of a prompt that are known."""
    for index, block in enumerate(request.prefix_hashes):
        if block not in known:
            return index
    return len(request.prefix_hashes)


def _tokens_of(request: Request, blocks: int) -> int:
    return min(blocks * request.block_tokens, request.input_tokens)
