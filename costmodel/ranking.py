"""`plan`: every plan priced at once, the possible ones ranked, the best simulated, the rest counted by reason.

    layouts x replicas x batches ──arrays──► memory ─► steady state ─► SLO ─► rank ─► simulate the best ─► records

Predictions carry a 90 % interval from the spread of their operators' sources; figures of the hardware that sources dispute widen
it. Pipeline and decode context parallelism have never been compared with measurements here, and say so.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from costmodel.apart import split_plans
from costmodel.graph import ModelGraph
from costmodel.grid import Grid
from costmodel.interval import Z90
from costmodel.machine import Machine
from costmodel.operators import BACKENDS, Layout, Provenance, source_for
from costmodel.plans import with_formats
from costmodel.playing import simulated_plans
from costmodel.records import Asked, Objective, OperatorRow, Plan, PlanResult
from costmodel.serving import Load, passes
from hotpass.errors import InputError, nearest


def plan(graph: ModelGraph, machine: Machine, load: Load, asked: Asked) -> PlanResult:
    """Rank all plans. Raises InputError for limits that nothing can hold by definition, and for traffic beyond the context."""
    _check(graph, machine, load, asked)
    graph = with_formats(graph, asked.precision)
    source = asked.kernels or source_for(machine, asked.backend)
    grid = Grid.of(graph, machine, source, load, asked)
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
        chosen += split_plans(grid, asked, fits)
    chosen.sort(key=lambda made: _sort_key(made, asked.objective, load))
    considered = len(grid.layout)
    if asked.simulate:
        chosen = simulated_plans(chosen, grid, asked)
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


def _fewest(grid: Grid, possible: NDArray[np.intp], asked: Asked, chosen: list[Plan]) -> int | None:
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


def _first_of_each(grid: Grid, order: NDArray[np.intp], limit: int = 200) -> NDArray[np.intp]:
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


def _frontier(grid: Grid, possible: NDArray[np.intp]) -> tuple[tuple[str, float, float], ...]:
    """(plan, tokens/s/user, tokens/s/GPU) of the points that no other beats in both."""
    users, per_gpu = 1e3 / grid.tpot[possible], grid.per_gpu[possible]
    order = np.lexsort((-per_gpu, -users))
    rising = np.maximum.accumulate(np.concatenate([[0.0], per_gpu[order]]))
    kept = order[per_gpu[order] > rising[:-1]]
    return tuple((grid.name(int(possible[place])), float(users[place]), float(per_gpu[place])) for place in kept)


def _sort_key(made: Plan, objective: Objective, load: Load) -> tuple[float, ...]:
    if objective is Objective.LATENCY:
        return (made.ttft_ms.value + made.tpot_ms.value * (load.output_tokens - 1),)
    if objective is Objective.GOODPUT and made.simulated:
        return (0.0, -made.simulated["goodput_per_gpu"])
    return (1.0, -made.tokens_per_s_per_gpu.value)


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
