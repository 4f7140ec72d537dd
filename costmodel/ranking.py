"""`plan`: every plan priced at once, the possible ones ranked, the best simulated, the rest counted by reason.

    layouts x replicas x batches ──arrays──► memory ─► steady state ─► SLO ─► rank ─► simulate the best ─► records

Predictions carry a 90 % interval from the spread of their operators' sources; figures of the hardware that sources dispute widen
it. Pipeline and decode context parallelism have never been compared with measurements here, and say so.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.calibration import Corrections, corrected
from costmodel.graph import ModelGraph
from costmodel.machine import Machine
from costmodel.operators import BACKENDS, Layout, Provenance, Roofline, source_for, step
from costmodel.plans import Memory, enumerate_layouts, memory_of, with_formats
from costmodel.records import SERVING_SPREAD, Z90, Asked, Interval, Objective, OperatorRow, Plan, PlanResult
from costmodel.serving import Load, Split, Steady, disaggregated, passes, steady_state
from costmodel.simulate import StepTimes, simulate
from hotpass.errors import InputError, nearest

Floats = NDArray[np.float64]

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sequences of one attention group."""
DISPUTED_SPREAD = 0.10
SIMULATED = 50


def plan(graph: ModelGraph, machine: Machine, load: Load, asked: Asked) -> PlanResult:
    """Rank all plans. Raises InputError for limits that nothing can hold by definition, and for traffic beyond the context."""
    _check(graph, machine, load, asked)
    graph = with_formats(graph, asked.precision)
    source = asked.kernels or source_for(machine, asked.backend)
    grid = _Grid.of(graph, machine, source, load, asked)
    pruned = Counter(grid.pruned)
    fits = grid.memory.total <= machine.memory_bytes
    known = np.isfinite(grid.tpot) & np.isfinite(grid.ttft)
    holds = grid.holds(asked)
    pruned["does not fit into memory"] += int((~fits).sum())
    pruned["unknown: the cost model has no time for it"] += int((fits & ~known).sum())
    pruned["misses the SLO"] += int((fits & known & ~holds).sum())
    possible = np.flatnonzero(fits & known & holds)
    order = possible[np.argsort(grid.score(asked.objective)[possible], kind="stable")]
    best = _first_of_each(grid, order)
    chosen = [grid.record(int(index), asked) for index in best]
    if asked.disaggregated:
        chosen += _split_plans(grid, asked, fits)
    chosen.sort(key=lambda made: _sort_key(made, asked.objective, load))
    considered = len(grid.layout)
    if asked.simulate:
        chosen = _simulated(chosen, grid, asked)
        chosen.sort(key=lambda made: _sort_key(made, asked.objective, load))
    return PlanResult(
        model=graph.name,
        hardware=machine.name,
        source=source.name,
        asked=asked,
        load=load,
        plans=tuple(chosen),
        frontier=_frontier(grid, np.flatnonzero(fits & known)),
        considered=considered,
        pruned={reason: count for reason, count in pruned.most_common() if count},
        next_measurement=next_measurement(chosen),
        fewest_gpus=_fewest(grid, possible, asked, chosen),
        disputed=machine.disputed,
        notes=tuple(dict.fromkeys([*getattr(source, "notes", []), *graph.notes])),
    )


def next_measurement(plans: list[Plan]) -> str | None:
    """The plan whose measurement would teach most about which is best: largest expected gain over the first (expected improvement
    under log-normal errors), the first itself when no other overlaps with it. None without plans."""
    if not plans:
        return None
    best = plans[0].tokens_per_s_per_gpu
    gains = []
    for made in plans[1:]:
        rate = made.tokens_per_s_per_gpu
        spread = math.log(rate.high / rate.low) / (2 * Z90)
        lead = (math.log(rate.value / best.value)) / spread
        density = math.exp(-(lead**2) / 2) / math.sqrt(2 * math.pi)
        gains.append(spread * (density + lead * 0.5 * (1 + math.erf(lead / math.sqrt(2)))))
    if not gains or max(gains) < 1e-3:
        return plans[0].name
    return plans[1 + int(np.argmax(gains))].name


def _fewest(grid: _Grid, possible: NDArray[np.intp], asked: Asked, chosen: list[Plan]) -> int | None:
    """Accelerators of the smallest plan that holds the limits: without a number of clients, of one replica."""
    shared = grid.replicas if asked.concurrency is not None else np.ones_like(grid.replicas)
    alone = [int((grid.layout.gpus * shared)[possible].min())] if len(possible) else []
    return min([*alone, *(made.gpus for made in chosen)], default=None)


def _check(graph: ModelGraph, machine: Machine, load: Load, asked: Asked) -> None:
    for field, value in (
        ("--slo-ttft-ms", asked.slo_ttft_ms),
        ("--slo-tpot-ms", asked.slo_tpot_ms),
        ("--price-per-gpu-hour", asked.price_per_gpu_hour),
    ):
        if value is not None and not value > 0:
            raise InputError(field, value, "is not a positive number", "give one, or leave it out")
    if asked.concurrency is not None and asked.concurrency < 1:
        raise InputError("--concurrency", asked.concurrency, "is not a number of clients", "give at least 1")
    if load.input_tokens < 1 or load.output_tokens < 1:
        raise InputError(
            "--traffic", f"{load.input_tokens:g}x{load.output_tokens:g}", "has no tokens", "give lengths of at least 1"
        )
    whole = load.input_tokens + load.output_tokens
    if whole > graph.max_context:
        raise InputError(
            "--traffic",
            f"{whole:g} tokens",
            f"is beyond the {graph.max_context} tokens of {graph.name}",
            "give shorter requests",
        )
    if asked.backend not in BACKENDS:
        raise InputError(
            "--backend", asked.backend, "is not an engine with kernel tables", nearest(asked.backend, list(BACKENDS))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """All aggregated plans priced: arrays [points]."""

    graph: ModelGraph
    machine: Machine
    source: Roofline
    load: Load
    layout: Layout
    replicas: NDArray[np.int64]
    concurrency: Floats
    """Of one replica."""
    steady: Steady
    memory: Memory
    pruned: Counter[str]
    kv_bytes: float
    spreads: dict[str, Floats]
    """Of the operators alone."""
    corrections: Corrections | None
    sources: NDArray[np.int8]
    """Weakest provenance."""

    @staticmethod
    def of(graph: ModelGraph, machine: Machine, source: Roofline, load: Load, asked: Asked) -> _Grid:
        kinds, pruned = enumerate_layouts(graph, machine)
        index, replicas, concurrency = _points(kinds, machine, asked)
        layout = kinds.take(index)
        steady = steady_state(graph, layout, source, load, concurrency, kv_bytes=asked.kv_bytes)
        sources = np.maximum(steady.decode.worst(), steady.prefill.worst())
        if asked.corrections is not None:
            steady = corrected(steady, layout, load, concurrency, asked.backend, asked.corrections)
        memory = memory_of(
            graph, layout, concurrency=concurrency, context=load.input_tokens + load.output_tokens, kv_bytes=asked.kv_bytes,
            chunk_tokens=asked.chunk_tokens, reserved_bytes=machine.reserved_bytes,
        )  # fmt: skip
        return _Grid(
            graph=graph, machine=machine, source=source, load=load, layout=layout, replicas=replicas, concurrency=concurrency,
            steady=steady, memory=memory, pruned=pruned, kv_bytes=asked.kv_bytes,
            spreads={"tpot": steady.decode.spread(), "ttft": steady.prefill.spread()},
            sources=sources, corrections=asked.corrections,
        )  # fmt: skip

    @property
    def tpot(self) -> Floats:
        return self.steady.tpot_s * 1e3

    @property
    def ttft(self) -> Floats:
        return self.steady.ttft_s * 1e3

    @property
    def per_gpu(self) -> Floats:
        """Output tokens a second of each accelerator."""
        return self.steady.tokens_per_s(self.load) / self.layout.gpus

    def holds(self, asked: Asked) -> NDArray[np.bool_]:
        held = np.ones(len(self.layout), np.bool_)
        if asked.slo_ttft_ms is not None:
            held &= self.ttft <= asked.slo_ttft_ms
        if asked.slo_tpot_ms is not None:
            held &= self.tpot <= asked.slo_tpot_ms
        return held

    def score(self, objective: Objective) -> Floats:
        """The smaller the better."""
        if objective is Objective.LATENCY:
            return self.ttft + (self.load.output_tokens - 1) * self.tpot
        return -self.per_gpu

    def name(self, index: int) -> str:
        return f"{int(self.replicas[index])}x({self.layout.label(index)}) c{int(self.concurrency[index])}"

    def spread(self, what: str, index: int) -> float:
        own = self.spreads[what][index]
        disputed = DISPUTED_SPREAD * len(
            set(self.machine.disputed) & {"memory_tb_per_s", "bf16_tflop_per_s", "fp8_tflop_per_s", "fp4_tflop_per_s"}
        )
        return float(np.sqrt(own**2 + SERVING_SPREAD[what] ** 2 + disputed**2))

    def interval(self, what: str, index: int, value: float, asked: Asked, *, apart: bool = False) -> Interval:
        """Around a time (`tpot`, `ttft`) or a rate (`rate`, of the time per token): calibrated where it was, else from the sources."""
        target = "tpot" if what == "rate" else what
        if self.corrections is None or apart:
            return Interval.around(value, self.spread(target, index))
        low, high = getattr(self.corrections, target).interval(f"agg/{asked.backend}")
        return (
            Interval(value=value, low=value / high, high=value / low)
            if what == "rate"
            else Interval(value=value, low=value * low, high=value * high)
        )

    def record(self, index: int, asked: Asked) -> Plan:
        i, gpus = index, int(self.layout.gpus[index])
        tokens = float(self.steady.tokens_per_s(self.load)[i])
        tpot = float(self.tpot[i])
        share = float(self.steady.prefill_share[i])
        cost = _cost(asked, gpus, float(self.steady.requests_per_s[i]), self.load, share, 1 - share)
        unvalidated = [name for name in ("pp", "dcp") if getattr(self.layout, name)[i] > 1]
        return Plan(
            name=self.name(i),
            index=i,
            gpus=gpus * int(self.replicas[i]),
            replicas=int(self.replicas[i]),
            concurrency=int(self.concurrency[i]),
            layout={
                name: int(getattr(self.layout, name)[i])
                for name in ("tp", "dp", "pp", "moe_tp", "ep", "dcp", "all_to_all")
            },
            ttft_ms=self.interval("ttft", i, float(self.ttft[i]), asked),
            tpot_ms=self.interval("tpot", i, tpot, asked),
            tokens_per_s_per_user=self.interval("rate", i, 1e3 / tpot, asked),
            tokens_per_s_per_gpu=self.interval("rate", i, tokens / gpus, asked),
            memory_gb_per_gpu=float(self.memory.total[i]) / 1e9,
            cost_per_million_input=cost[0],
            cost_per_million_output=cost[1],
            source=f"calibrated {self.corrections.version}"
            if self.corrections
            else Provenance(int(self.sources[i])).label,
            unvalidated=tuple(unvalidated),
        )


def _points(kinds: Layout, machine: Machine, asked: Asked) -> tuple[NDArray[np.intp], NDArray[np.int64], Floats]:
    """(layout, replicas, clients of one replica) of every point. With a number of clients: every number of replicas that shares
    them; without: as many replicas as there is room for, at every batch."""
    most = machine.num_devices // kinds.gpus
    if asked.concurrency is None:
        index = np.repeat(np.arange(len(kinds)), len(BATCHES))
        batch = np.tile(np.array(BATCHES, np.float64), len(kinds)) * kinds.dp[index].astype(np.float64)
        return index, most[index], batch
    counts: list[NDArray[np.int64]] = [
        np.array([r for r in sorted({*(2**i for i in range(12)), int(m)}) if r <= m]) for m in most
    ]
    index = np.repeat(np.arange(len(kinds)), [len(c) for c in counts])
    replicas = np.concatenate(counts)
    return index, replicas, np.ceil(float(asked.concurrency) / replicas.astype(np.float64))


def _first_of_each(grid: _Grid, order: NDArray[np.intp], limit: int = 200) -> NDArray[np.intp]:
    """The best point of each layout and number of replicas: neighbours in batch are no other plan."""
    keys = np.stack(
        [
            *(getattr(grid.layout, name)[order] for name in ("tp", "dp", "pp", "ep", "dcp", "all_to_all")),
            grid.replicas[order],
        ],
        axis=1,
    )
    _, first = np.unique(keys, axis=0, return_index=True)
    return order[np.sort(first)][:limit]


def _frontier(grid: _Grid, possible: NDArray[np.intp]) -> tuple[tuple[str, float, float], ...]:
    """(plan, tokens/s/user, tokens/s/GPU) of the points that no other beats in both."""
    users, per_gpu = 1e3 / grid.tpot[possible], grid.per_gpu[possible]
    order = np.lexsort((-per_gpu, -users))
    rising = np.maximum.accumulate(np.concatenate([[0.0], per_gpu[order]]))
    kept = order[per_gpu[order] > rising[:-1]]
    return tuple((grid.name(int(possible[place])), float(users[place]), float(per_gpu[place])) for place in kept)


def _cost(
    asked: Asked, gpus: float, requests_per_s: float, load: Load, for_input: float, for_output: float
) -> tuple[float | None, float | None]:
    """Price of a million tokens: the accelerators' time is charged to input and output by the time that prefill and decode take."""
    if asked.price_per_gpu_hour is None:
        return None, None
    per_request = asked.price_per_gpu_hour / 3600 * gpus / requests_per_s
    return per_request * for_input / load.input_tokens * 1e6, per_request * for_output / load.output_tokens * 1e6


def _sort_key(made: Plan, objective: Objective, load: Load) -> tuple[float, ...]:
    if objective is Objective.LATENCY:
        return (made.ttft_ms.value + made.tpot_ms.value * (load.output_tokens - 1),)
    if objective is Objective.GOODPUT and made.simulated:
        return (0.0, -made.simulated["goodput_per_gpu"])
    return (1.0, -made.tokens_per_s_per_gpu.value)


def _split_plans(grid: _Grid, asked: Asked, fits: NDArray[np.bool_]) -> list[Plan]:
    """Disaggregated plans: the best prefill workers with the best decode workers, in the numbers that balance them."""
    machine, load, layout = grid.machine, grid.load, grid.layout
    plain = fits & (layout.pp == 1) & (layout.dcp == 1)
    prefill_s = grid.steady.prefill.seconds
    lanes = layout.dp.astype(float)
    first = np.flatnonzero(plain)
    if not len(first):
        return []
    _, one_each = np.unique(
        np.stack([layout.tp[first], layout.dp[first], layout.ep[first], layout.all_to_all[first]], 1),
        axis=0,
        return_index=True,
    )
    first = first[one_each]
    rate = lanes[first] / prefill_s[first] / layout.gpus[first]
    pre = np.unique(np.concatenate([first[np.argsort(-rate)[:6]], first[np.argsort(prefill_s[first])[:3]]]))
    decode_s = grid.steady.decode.seconds
    dec = np.flatnonzero(plain & ((decode_s * 1e3 <= asked.slo_tpot_ms) if asked.slo_tpot_ms else True))
    dec = dec[np.argsort(-(grid.concurrency[dec] / decode_s[dec] / layout.gpus[dec]))[:60]]
    workers = np.array([1, 2, 3, 4, 6, 8, 12, 16])
    p, d, np_, nd = (a.ravel() for a in np.meshgrid(pre, dec, workers, workers, indexing="ij"))
    total = layout.gpus[p] * np_ + layout.gpus[d] * nd
    keep = (total <= machine.num_devices) & ((total <= machine.domain) | (machine.scale_out_bytes_per_s > 0))
    if asked.concurrency is not None:
        # Decode workers that hold the clients; prefill is free to vary.
        keep &= (grid.concurrency[d] * nd >= asked.concurrency) & (grid.concurrency[d] * nd < 2 * asked.concurrency)
    p, d, np_, nd, total = (a[keep] for a in (p, d, np_, nd, total))
    if not len(p):
        return []
    rate_of_link = np.where(total <= machine.domain, machine.scale_up_bytes_per_s, machine.scale_out_bytes_per_s)
    split = disaggregated(
        prefill_s=prefill_s[p], decode_s=decode_s[d], prefill_lanes=lanes[p] * np_, concurrency=grid.concurrency[d] * nd,
        load=load, cache_bytes=grid.graph.kv_bytes(int(load.input_tokens), grid.kv_bytes), link_bytes_per_s=rate_of_link,
    )  # fmt: skip
    held = np.ones(len(p), np.bool_)
    if asked.slo_ttft_ms is not None:
        held &= split.ttft_s * 1e3 <= asked.slo_ttft_ms
    per_gpu = split.requests_per_s * load.output_tokens / total
    good = np.flatnonzero(held)
    latency = split.ttft_s + split.tpot_s * load.output_tokens
    score = latency if asked.objective is Objective.LATENCY else -per_gpu
    return [
        _split_record(grid, asked, split, per_gpu, (p, d, np_, nd, total), int(i))
        for i in good[np.argsort(score[good])][:20]
    ]


def _split_record(
    grid: _Grid, asked: Asked, split: Split, per_gpu: Floats, pairs: tuple[NDArray[np.int64], ...], i: int
) -> Plan:
    p, d, np_, nd, total = (int(values[i]) for values in pairs)
    spread = grid.spread("tpot", d)
    rate = float(split.requests_per_s[i])
    in_gpus, out_gpus = int(grid.layout.gpus[p]) * np_, int(grid.layout.gpus[d]) * nd
    cost = _cost(asked, total, rate, grid.load, in_gpus / total, out_gpus / total)
    source = max(int(grid.sources[d]), int(grid.sources[p]))
    return Plan(
        name=f"prefill {np_}x({grid.layout.label(p)}) decode {nd}x({grid.layout.label(d)}) c{int(grid.concurrency[d])}",
        index=d,
        prefill_index=p,
        gpus=total,
        replicas=nd,
        concurrency=int(grid.concurrency[d]) * nd,
        layout={
            name: int(getattr(grid.layout, name)[d]) for name in ("tp", "dp", "pp", "moe_tp", "ep", "dcp", "all_to_all")
        },
        ttft_ms=Interval.around(float(split.ttft_s[i]) * 1e3, grid.spread("ttft", p)),
        tpot_ms=Interval.around(float(split.tpot_s[i]) * 1e3, spread),
        tokens_per_s_per_user=Interval.around(1 / float(split.tpot_s[i]), spread),
        tokens_per_s_per_gpu=Interval.around(float(per_gpu[i]), spread),
        memory_gb_per_gpu=float(max(grid.memory.total[p], grid.memory.total[d])) / 1e9,
        cost_per_million_input=cost[0],
        cost_per_million_output=cost[1],
        source=Provenance(source).label,
        unvalidated=(),
    )


def _simulated(chosen: list[Plan], grid: _Grid, asked: Asked) -> list[Plan]:
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
            },
        )
    return [by_name.get(made.name, made) for made in chosen]


def _step_times(indices: list[int], grid: _Grid, asked: Asked) -> list[StepTimes]:
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


def _decode_seconds(grid: _Grid, layout: Layout, batch: Floats, context: Floats) -> Floats:
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


def _prefill_seconds(grid: _Grid, layout: Layout, tokens: Floats) -> Floats:
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


def explain(graph: ModelGraph, machine: Machine, load: Load, asked: Asked, made: Plan) -> list[OperatorRow]:
    """A plan's decode step and prefill as sums of operators, the largest first."""
    graph = with_formats(graph, asked.precision)
    source = asked.kernels or source_for(machine, asked.backend)
    layout = Layout.one(made.layout)
    each = made.concurrency / (made.replicas if made.prefill_index is not None else 1)
    decode, prefill = passes(graph, layout, source, load, np.array([float(each)]), kv_bytes=asked.kv_bytes)
    rows = []
    for phase, done in (("decode", decode), ("prefill", prefill)):
        total = float(done.seconds[0])
        for operator in sorted(done.operators, key=lambda o: -float(o.seconds[0])):
            if operator.seconds[0] > 0:
                rows.append(
                    OperatorRow(
                        phase=phase, operator=operator.name, kind=operator.kind.value, milliseconds=float(operator.seconds[0]) * 1e3,
                        share=float(operator.seconds[0]) / total, source=Provenance(int(operator.provenance[0])).label,
                    )
                )  # fmt: skip
    return rows
