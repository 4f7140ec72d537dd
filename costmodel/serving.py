"""From step times to what a client sees: the steady state of a closed loop, in closed form for ranking.

C clients each send a prompt, read the answer, and send the next. A replica's accelerators do all the prefill that its decode
implies: between two tokens of a sequence lies one decode step and this sequence's share of the others' prefills. Prompts queue for
a place in the steps; what waits is a closed queue of C customers with one server, counted in steps. The discrete simulation (`costmodel.simulate`) plays the same
loop event by event.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.graph import ModelGraph
from costmodel.operators import Layout, OperatorSource, Step, step

Floats = NDArray[np.float64]

CHUNK_TOKENS = 8192
"""Prompt tokens of one step: what vLLM and SGLang take on large GPUs unless told otherwise."""
ACCEPTED = (1.0, 1.85, 2.45, 2.80)
"""Drafts of a step → tokens that it yields. The second token of DeepSeek-V3's own draft layer is accepted in 85 to 90 % (technical report,
2024); run again for later tokens, seven drafts yield 3.1 to 3.2 (nebius/MTP-DeepSeek-V3-0324, 2026): 0.85, 0.70 and 0.60 one by one."""


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
    loop: Loop
    """Both times in parts."""

    def tokens_per_s(self, load: Load) -> Floats:
        """Output tokens of the replica."""
        return self.requests_per_s * load.output_tokens


def steady_state(
    graph: ModelGraph, layout: Layout, source: OperatorSource, load: Load, concurrency: Floats, *, kv_bytes: float = 2.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Steady:  # fmt: skip
    """Prefill and decode on the same accelerators, `chunk_tokens` of prompts beside the decoding sequences of a step."""
    decode, prefill = passes(graph, layout, source, load, concurrency, kv_bytes=kv_bytes)
    waiting = np.maximum(concurrency / layout.dp, 1.0)
    prompt = np.full_like(waiting, max(load.input_tokens * (1.0 - load.cached_share), 1.0))
    loop = closed_loop(
        waiting, prefill.seconds, decode.seconds, prompt, load.output_tokens, chunk_tokens=chunk_tokens, stages=layout.pp
    )  # fmt: skip
    cycle = loop.ttft_s + np.maximum(load.output_tokens - 1.0, 0.0) * loop.tpot_s
    service = prefill.seconds / layout.pp
    return Steady(
        ttft_s=loop.ttft_s,
        tpot_s=loop.tpot_s,
        requests_per_s=concurrency / cycle,
        prefill_share=waiting * service / (waiting * service + load.output_tokens * decode.seconds),
        prefill=prefill,
        decode=decode,
        loop=loop,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A closed loop in its steady state: both times as sums of their parts, arrays."""

    decode_s: Floats
    interference_s: Floats
    """What others' prompts add to each token."""
    prefill_s: Floats
    """A prompt alone."""
    beside_s: Floats
    """The step that runs when a prompt arrives, and the decode steps that its chunks run beside."""
    queue_s: Floats
    """Behind others' prompts."""

    @property
    def tpot_s(self) -> Floats:
        return self.decode_s + self.interference_s

    @property
    def ttft_s(self) -> Floats:
        return self.prefill_s + self.beside_s + self.queue_s


def closed_loop(
    clients: Floats, prefill_s: Floats, decode_s: Floats, prompt_tokens: Floats, output_tokens: Floats | float, *,
    chunk_tokens: Floats | int = CHUNK_TOKENS, stages: Floats | NDArray[np.int64] | float = 1.0,
) -> Loop:  # fmt: skip
    """`clients` of one attention group, by continuous batching: each step decodes one token of every sequence and takes up to
    `chunk_tokens` of waiting prompts beside it. So the queue for prefill is counted in steps: a prompt takes a share of one (or
    several), and a client is away for as many steps as its answer has tokens. A waiting prompt sees full steps; the prompts that
    are not taken while one waits are taken while one decodes, and lengthen its steps. Pipeline stages take prompts at once."""
    share = prompt_tokens / chunk_tokens / stages
    service = prefill_s / stages
    own = np.maximum(prompt_tokens / chunk_tokens, 1.0)
    waited = queue_wait(clients, share, output_tokens + own - share)
    others = np.maximum(clients - 1.0 - waited / share, 0.0)
    return Loop(
        decode_s=decode_s,
        interference_s=np.asarray(service * others / output_tokens, np.float64),
        prefill_s=prefill_s,
        beside_s=(0.5 + own) * decode_s * (clients - 1.0) / clients,
        queue_s=waited * (service / share + decode_s),
    )


def burst_wait(
    clients: Floats,
    prefill_s: Floats,
    decode_s: Floats,
    prompt_tokens: Floats,
    chunk_tokens: Floats | int = CHUNK_TOKENS,
) -> Floats:
    """Mean wait when all clients send their first prompt at once: half of them are ahead, and half of the steps decode."""
    return 0.5 * (clients - 1.0) * (prefill_s + 0.5 * decode_s * prompt_tokens / chunk_tokens)


def passes(
    graph: ModelGraph, layout: Layout, source: OperatorSource, load: Load, concurrency: Floats, *, kv_bytes: float
) -> tuple[Step, Step]:
    """(decode step of the whole batch at the mean context, prefill of one prompt a group)."""
    decode = decode_step(graph, layout, source, load, concurrency, kv_bytes=kv_bytes)
    return decode, prefill_step(graph, layout, source, load, kv_bytes=kv_bytes)


def decode_step(
    graph: ModelGraph, layout: Layout, source: OperatorSource, load: Load, concurrency: Floats, *, kv_bytes: float, drafts: int = 0,
) -> Step:  # fmt: skip
    """The whole batch at the mean context. With drafts a step proposes so many tokens of each sequence, one after the other by a layer
    of the model's last kind and the head, and checks them all at once: it yields `ACCEPTED[drafts]` tokens of each."""
    each = np.maximum(concurrency / layout.dp / layout.pp, 1.0)
    one = np.ones_like(each)
    past = one * (load.input_tokens + load.output_tokens / 2)
    checked = step(
        graph, layout, source, decode=True, sequences=each, tokens=one * (1.0 + drafts), past=past, kv_bytes=kv_bytes
    )  # fmt: skip
    if not drafts:
        return checked
    drafter = replace(graph, layers=((1, graph.layers[-1][1]),))
    drafted = step(drafter, layout, source, decode=True, sequences=each, tokens=one, past=past, kv_bytes=kv_bytes)
    again = [
        replace(o, name=f"draft/{o.name}", seconds=drafts * o.seconds, calls=drafts * o.calls)
        for o in drafted.operators
    ]
    return Step(operators=(*checked.operators, *again))


def prefill_step(
    graph: ModelGraph,
    layout: Layout,
    source: OperatorSource,
    load: Load,
    *,
    kv_bytes: float,
    prompts: Floats | float = 1.0,
) -> Step:
    """So many prompts of each attention group at once."""
    one = np.ones(len(layout))
    new = load.input_tokens * (1.0 - load.cached_share)
    return step(
        graph, layout, source, decode=False, sequences=one * prompts, tokens=one * max(new, 1.0), past=one * (load.input_tokens - new),
        kv_bytes=kv_bytes,
    )  # fmt: skip


def queue_wait(customers: Floats, service_s: Floats, away_s: Floats) -> Floats:
    """Mean wait of one of `customers` that return `away_s` after each service, in any unit of time: mean value analysis of a closed queue (Reiser and
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
    # However the wait is approximated, the server cannot serve more than all of the time.
    return np.maximum(wait, (customers - 1.0) * service_s - away_s)


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
