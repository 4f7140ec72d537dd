"""Disaggregated plans: prefill and decode on accelerators of their own, in the numbers that balance them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodel.grid import Grid, cost_of
from costmodel.interval import Interval
from costmodel.operators import Provenance
from costmodel.records import Asked, Objective, Plan
from costmodel.serving import Split, disaggregated

Floats = NDArray[np.float64]


def split_plans(grid: Grid, asked: Asked, fits: NDArray[np.bool_]) -> list[Plan]:
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
    grid: Grid, asked: Asked, split: Split, per_gpu: Floats, pairs: tuple[NDArray[np.int64], ...], i: int
) -> Plan:
    p, d, np_, nd, total = (int(values[i]) for values in pairs)
    spread = grid.spread("tpot", d)
    rate = float(split.requests_per_s[i])
    in_gpus, out_gpus = int(grid.layout.gpus[p]) * np_, int(grid.layout.gpus[d]) * nd
    each = Interval.around(float(per_gpu[i]), spread)
    cost = cost_of(asked, total, rate, grid.load, in_gpus / total, out_gpus / total, each)
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
        tokens_per_s_per_gpu=each,
        memory_gb_per_gpu=float(max(grid.memory.total[p], grid.memory.total[d])) / 1e9,
        cost_per_million_input=cost[0],
        cost_per_million_output=cost[1],
        source=Provenance(source).label,
        unvalidated=(),
    )
