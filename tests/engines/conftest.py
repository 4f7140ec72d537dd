"""A tiny deployment, and an engine whose children run the toy program: shared by the tests of processes and judge."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.decoder_engine import DecoderEngine
from engines.limits import ChildLimits
from engines.prepare.model import prepare_model
from engines.prepare.tiny import make_tiny_model
from engines.program import ReplayRequest
from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse
from hotpass.records.deployment import Deployment, HardwareRef, ModelRef, Serving, TrafficRef
from hotpass.records.measurement import Assignment, Purpose, Stopping, Tier
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable

ROWS = (
    ShapeRow(
        phase=Phase.DECODE,
        num_seqs=2,
        query_tokens=2,
        context_mean=12,
        context_max=16,
        steps_share=0.75,
        tokens_share=0.9,
    ),
    ShapeRow(
        phase=Phase.PREFILL,
        num_seqs=1,
        query_tokens=8,
        context_mean=0,
        context_max=0,
        steps_share=0.25,
        tokens_share=0.1,
    ),
)
QUICK = Stopping(min_rounds=3, max_rounds=4)
MEMORY_LIMIT = 1 << 30


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    folder = tmp_path_factory.mktemp("tiny")
    return prepare_model(str(make_tiny_model(folder / "model")), cache_dir=folder / "cache")


@pytest.fixture(scope="session")
def deployment(tiny_model: ModelRef) -> Deployment:
    return Deployment(
        model=tiny_model,
        traffic=TrafficRef(
            name="none", source_format="preset", content_hash="0", num_requests=1, dropped={}, content_valid=False
        ),
        hardware=HardwareRef(
            name="cpu", device="cpu", num_devices=1, isa=(), last_level_cache_bytes=1 << 25, memory_bytes=1 << 33
        ),
        serving=Serving(),
        concurrency=2,
        shapes=ShapeTable(rows=ROWS, concurrency=2, chunk_tokens=8, num_steps=10, output_tokens_per_step=1.5),
    )


def toy_engine(
    *, limits: ChildLimits | None = None, program: str = "toy_program:ToyProgram", **options: object
) -> DecoderEngine:
    """Not loaded yet."""
    return DecoderEngine(
        "toy",
        program=program,
        search_path=[str(Path(__file__).parent)],
        threads=1,
        window_ms=2.0,
        aa_seconds=0.05,
        pool_sets=4,
        limits=limits or ChildLimits(memory_bytes=MEMORY_LIMIT),
        requests=_requests,
        **options,  # type: ignore[arg-type]
    )


def _requests(count: int, seed: int, held_out: bool) -> list[ReplayRequest]:
    return [ReplayRequest(request_id=i, tokens=(1 + i, 2, 3), output_tokens=1 + i % 3) for i in range(count)]


@pytest.fixture(scope="module")
def toy(deployment: Deployment) -> Iterator[DecoderEngine]:
    """A loaded toy engine, whole model as the fast tier."""
    with toy_engine() as engine:
        engine.load(deployment, Tier.FAST)
        yield engine


def candidate(body: str, *, setup: str = "pass", numerics: Numerics = Numerics.TOLERANCE) -> Candidate:
    """A part of the toy program: `body` is the text of its forward, `setup` that of its constructor."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    text = (
        "import ctypes, os, sys, time, threading, torch\n"
        "from hotpass import part\n"
        "@part(engine='decoder', claims=['model'])\n"
        "class Part:\n"
        "    def __init__(self):\n"
        f"        {setup}\n"
        f"    def forward(self, tokens, summaries, reference):\n{lines}\n"
    )
    source = PartSource(name="planted", files=(("part.py", text),))
    return Candidate(parts=(PartUse(source=source),), numerics=numerics)


def assignment(deployment: Deployment, part: Candidate, **changes: object) -> Assignment:
    """Measure a candidate against as loaded on every row."""
    given: dict[str, object] = {
        "incumbent": Candidate(),
        "candidate": part,
        "tier": Tier.FAST,
        "purpose": Purpose.SEARCH,
        "rows": deployment.shapes.rows,
        "seed": 7,
        "deadline_seconds": 60.0,
        "stopping": QUICK,
    }
    return Assignment(**{**given, **changes})  # type: ignore[arg-type]


def open_files() -> set[str]:
    """What this process has open, by kind of thing."""
    return {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
