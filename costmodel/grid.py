"""All aggregated plans of a question, priced at once: arrays, and records of the points that someone asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.calibration import Corrections, corrected
from costmodel.graph import ModelGraph
from costmodel.interval import Interval
from costmodel.machine import Machine
from costmodel.operators import Layout, Provenance, Roofline
from costmodel.plans import Memory, enumerate_layouts, memory_of
from costmodel.records import SERVING_SPREAD, Asked, Objective, Plan
from costmodel.serving import Load, Steady, steady_state

Floats = NDArray[np.float64]

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sequences of one attention group."""
DISPUTED_SPREAD = 0.10
"""Standard deviation of log time that each figure adds about which sources disagree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
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
    def of(graph: ModelGraph, machine: Machine, source: Roofline, load: Load, asked: Asked) -> Grid:
        kinds, pruned = enumerate_layouts(graph, machine)
        index, replicas, concurrency = points(kinds, machine, asked)
        layout = kinds.take(index)
        steady = steady_state(graph, layout, source, load, concurrency, kv_bytes=asked.kv_bytes)
        sources = np.maximum(steady.decode.worst(), steady.prefill.worst())
        if asked.corrections is not None:
            steady = corrected(steady, load, concurrency, asked.backend, asked.precision, asked.corrections)
        memory = memory_of(
            graph, layout, concurrency=concurrency, context=load.input_tokens + load.output_tokens, kv_bytes=asked.kv_bytes,
            chunk_tokens=asked.chunk_tokens, reserved_bytes=machine.reserved_bytes,
        )  # fmt: skip
        return Grid(
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

    def interval(self, what: str, index: int, value: float, asked: Asked) -> Interval:
        """Around a time (`tpot`, `ttft`) or a rate (`rate`, of the time per token): calibrated where it was, else from the sources."""
        target = "tpot" if what == "rate" else what
        if self.corrections is None:
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
        rate = self.interval("rate", i, tokens / gpus, asked)
        cost = cost_of(asked, gpus, float(self.steady.requests_per_s[i]), self.load, share, 1 - share, rate)
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
            tokens_per_s_per_gpu=rate,
            memory_gb_per_gpu=float(self.memory.total[i]) / 1e9,
            cost_per_million_input=cost[0],
            cost_per_million_output=cost[1],
            source=f"calibrated {self.corrections.version}"
            if self.corrections
            else Provenance(int(self.sources[i])).label,
            unvalidated=tuple(unvalidated),
        )


def points(kinds: Layout, machine: Machine, asked: Asked) -> tuple[NDArray[np.intp], NDArray[np.int64], Floats]:
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


def cost_of(
    asked: Asked, gpus: float, requests_per_s: float, load: Load, for_input: float, for_output: float, rate: Interval
) -> tuple[Interval | None, Interval | None]:
    """Price of a million tokens: the accelerators' time is charged to input and output by the time that prefill and decode take; a
    slower `rate` costs more in proportion."""
    if asked.price_per_gpu_hour is None:
        return None, None
    per_request = asked.price_per_gpu_hour / 3600 * gpus / requests_per_s
    costs = per_request * for_input / load.input_tokens * 1e6, per_request * for_output / load.output_tokens * 1e6
    first, second = (
        Interval(value=cost, low=cost * rate.value / rate.high, high=cost * rate.value / rate.low) for cost in costs
    )
    return first, second
