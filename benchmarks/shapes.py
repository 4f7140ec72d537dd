"""Deployments for benchmarks: the shape points that engines are compared at, and one loaded engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from actors.spec import EngineSpec, make_builder, make_engine
from engines.decoder_engine import DecoderEngine
from engines.prepare import prepare_model
from engines.probe import probe_hardware
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, PartUse, Value
from hotpass.records.deployment import Deployment, HardwareRef, ModelRef, Serving
from hotpass.records.measurement import Tier
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from hotpass.settings import numerics_of_settings
from hotpass.traffic import read_traffic
from search.catalogue import find_part

DECODE_1 = ShapeRow(
    phase=Phase.DECODE, num_seqs=1, query_tokens=1, context_mean=256, context_max=256, steps_share=0.4, tokens_share=0.1
)
DECODE_8 = ShapeRow(
    phase=Phase.DECODE, num_seqs=8, query_tokens=8, context_mean=256, context_max=256, steps_share=0.4, tokens_share=0.8
)
PREFILL_512 = ShapeRow(
    phase=Phase.PREFILL, num_seqs=1, query_tokens=512, context_mean=0, context_max=0, steps_share=0.2, tokens_share=0.1
)
POINTS = {"decode-1": DECODE_1, "decode-8": DECODE_8, "prefill-512": PREFILL_512}


def deployment_of(
    model: ModelRef, hardware: HardwareRef, rows: tuple[ShapeRow, ...] = tuple(POINTS.values())
) -> Deployment:
    """A model at given shape points; the traffic is that of the `chat` preset, for what replays."""
    table = ShapeTable(rows=rows, concurrency=8, chunk_tokens=512, num_steps=1, output_tokens_per_step=1.0)
    return Deployment(
        model=model,
        traffic=read_traffic("chat", max_context=model.max_context).ref,
        hardware=hardware,
        serving=Serving(),
        concurrency=8,
        shapes=table,
    )


@contextlib.contextmanager
def loaded_engine(deployment: Deployment, threads: int = 0) -> Iterator[DecoderEngine]:
    """A decoder engine with a builder, in this process, without Ray."""
    traffic = read_traffic("chat", max_context=deployment.model.max_context, limit=200)
    spec = EngineSpec(kind="decoder", name="bench", device=deployment.hardware.device, threads=threads, traffic=traffic)
    engine = make_engine(spec, deployment)
    assert isinstance(engine, DecoderEngine)
    try:
        engine.load(deployment, Tier.FAST)
        yield engine
    finally:
        engine.close()


def catalogue_candidate(
    part: str, params: dict[str, Value], dtype: str, settings: dict[str, Value] | None = None
) -> Candidate:
    """One catalogue part with settings, its class worked out."""
    source = find_part(part)
    declared = declaration(source)
    use: PartUse = declared.bind(source, params)
    kinds = (declared.numerics_of(use.params, dtype), numerics_of_settings(settings or {}, dtype))
    return Candidate(parts=(use,), settings=settings or {}, numerics=max(kinds, key=lambda kind: kind.rank))


__all__ = [
    "POINTS",
    "catalogue_candidate",
    "deployment_of",
    "loaded_engine",
    "make_builder",
    "prepare_model",
    "probe_hardware",
]
