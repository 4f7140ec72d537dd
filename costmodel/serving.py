"""From step times to what a client sees: the steady state of a closed loop, in closed form for ranking.

C clients each send a prompt, read the answer, and send the next. A replica's accelerators do all the prefill that its decode
implies: between two tokens of a sequence lies one decode step and this sequence's share of the others' prefills. Prompts queue for
prefill; what waits is a closed queue of C customers with one server. The discrete simulation (`costmodel.simulate`) plays the same
loop event by event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.graph import ModelGraph
from costmodel.operators import Layout, OperatorSource, Step, step

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Traffic as the cost model needs it."""

    input_tokens: float
    """Mean prompt, cached prefix included."""
    output_tokens: float
    cached_share: float = 0.0
    """Part of the prompt that a prefix cache holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """Steady state of one replica, arrays [plans]."""

    ttft_s: Floats
    tpot_s: Floats
    requests_per_s: Floats
    """Of the replica."""
    prefill_share: Floats
    """Part of the time that goes to prefill."""
    prefill: Step
    decode: Step

    def tokens_per_s(self, load: Load) -> Floats:
        """Output tokens of the replica."""
        return self.requests_per_s * load.output_tokens


def steady_state(
    graph: ModelGraph, layout: Layout, source: OperatorSource, load: Load, concurrency: Floats, *, kv_bytes: float = 2.0,
    host_seconds: float = 0.0,
) -> Steady:  # fmt: skip
    """Prefill and decode on the same accelerators. `host_seconds`: what each step takes beyond its operators."""
    decode, prefill = passes(graph, layout, source, load, concurrency, kv_bytes=kv_bytes)
    waiting = np.maximum(concurrency / layout.dp, 1.0)
    decode_s, prefill_s = decode.seconds + host_seconds, prefill.seconds + host_seconds
    service = prefill_s / layout.pp
    queue = queue_wait(waiting, service, load.output_tokens * decode_s)
    ttft = prefill_s + 0.5 * decode_s + queue
    tpot = decode_s + interference(waiting, service, decode_s, ttft, load.output_tokens)
    cycle = ttft + np.maximum(load.output_tokens - 1.0, 0.0) * tpot
    return Steady(
        ttft_s=ttft,
        tpot_s=tpot,
        requests_per_s=concurrency / cycle,
        prefill_share=waiting * service / (waiting * service + load.output_tokens * decode_s),
        prefill=prefill,
        decode=decode,
    )


def passes(
    graph: ModelGraph, layout: Layout, source: OperatorSource, load: Load, concurrency: Floats, *, kv_bytes: float
) -> tuple[Step, Step]:
    """(decode step of the whole batch at the mean context, prefill of one prompt a group)."""
    each = np.maximum(concurrency / layout.dp / layout.pp, 1.0)
    one = np.ones_like(each)
    new = load.input_tokens * (1.0 - load.cached_share)
    decode = step(
        graph, layout, source, decode=True, sequences=each, tokens=one, past=one * (load.input_tokens + load.output_tokens / 2),
        kv_bytes=kv_bytes,
    )  # fmt: skip
    prefill = step(
        graph, layout, source, decode=False, sequences=one, tokens=one * max(new, 1.0), past=one * (load.input_tokens - new),
        kv_bytes=kv_bytes,
    )  # fmt: skip
    return decode, prefill


def interference(
    customers: Floats, service_s: Floats, decode_s: Floats, ttft_s: Floats, output_tokens: Floats | float
) -> Floats:
    """What others' prefills add to each token: every other client prefills once in a cycle, but only the part that falls into this
    client's decoding delays its tokens; the rest falls into its own wait for the first."""
    others = (customers - 1.0) * service_s
    added = others
    for _ in range(30):
        decoding = output_tokens * decode_s + added
        added = 0.5 * added + 0.5 * others * decoding / (decoding + ttft_s)
    return np.asarray(added / output_tokens, np.float64)


def queue_wait(customers: Floats, service_s: Floats, away_s: Floats) -> Floats:
    """Mean wait of one of `customers` that return `away_s` after each service: mean value analysis of a closed queue (Reiser and
    Lavenberg 1980) with constant service, so that a waiting customer costs half of what exponential service would; solved by
    Schweitzer's fixed point, so that it costs the same for any number of customers."""
    length = np.zeros_like(service_s)
    wait = np.zeros_like(service_s)
    for _ in range(40):
        seen = length * (customers - 1.0) / customers
        busy = np.minimum(seen, 1.0)
        wait = service_s * np.maximum(seen - 0.5 * busy, 0.0)
        rate = customers / (away_s + service_s + wait)
        length = rate * (wait + service_s)
    return wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Disaggregated: what one prefill worker and one decode worker do, arrays [pairs]."""

    ttft_s: Floats
    tpot_s: Floats
    requests_per_s: Floats
    transfer_s: Floats
    """Moving one prompt's cache from the prefill to the decode worker."""


def disaggregated(
    *, prefill_s: Floats, decode_s: Floats, prefill_lanes: Floats, concurrency: Floats, load: Load, cache_bytes: float,
    link_bytes_per_s: Floats,
) -> Split:  # fmt: skip
    """`prefill_lanes`: prompts that the prefill workers take at a time in all (workers x attention groups x stages); `concurrency`
    of all decode workers, whose step takes `decode_s` at that batch."""
    transfer = cache_bytes / link_bytes_per_s
    service = prefill_s / prefill_lanes
    wait = queue_wait(np.maximum(concurrency, 1.0), service, load.output_tokens * decode_s + transfer)
    ttft = prefill_s + wait + transfer + decode_s
    cycle = ttft + np.maximum(load.output_tokens - 1.0, 0.0) * decode_s
    rate = np.minimum(concurrency / cycle, 1.0 / service)
    return Split(ttft_s=ttft, tpot_s=decode_s, requests_per_s=rate, transfer_s=transfer + np.zeros_like(ttft))
