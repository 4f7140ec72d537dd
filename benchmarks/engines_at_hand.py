"""The engine that the benchmarks of reloads, A/A and leaks load: SmolLM2-135M on the shapes that each needs, or a tiny model for trying
them out (`--small`), whose figures mean nothing."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.shapes import deployment_of, loaded_engine, prepare_model, probe_hardware
from engines.decoder_engine import DecoderEngine
from engines.prepare.tiny import make_tiny_model
from hotpass.records.deployment import Deployment
from hotpass.records.shapes import Phase, ShapeRow

SMALL_ROWS = tuple(
    ShapeRow(
        phase=phase, num_seqs=1, query_tokens=query, context_mean=context, context_max=context, steps_share=0.5, tokens_share=0.5
    )
    for phase, query, context in ((Phase.DECODE, 1, 16), (Phase.PREFILL, 8, 0))
)  # fmt: skip


@contextlib.contextmanager
def engine_at_hand(rows: tuple[ShapeRow, ...], *, small: bool) -> Iterator[tuple[DecoderEngine, Deployment]]:
    """Loaded, without Ray. `rows` are those of SmolLM2-135M."""
    hardware = probe_hardware("cpu")
    if not small:
        deployment = deployment_of(prepare_model("smollm2-135m"), hardware, rows)
        with loaded_engine(deployment) as engine:
            yield engine, deployment
        return
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_model(str(make_tiny_model(Path(folder, "model"))), cache_dir=Path(folder, "cache"))
        made = deployment_of(model, hardware, SMALL_ROWS)
        deployment = replace(made, concurrency=2)
        with DecoderEngine("bench", threads=1, cache_dir=folder, window_ms=4.0, aa_seconds=0.3) as engine:
            engine.load(deployment)
            yield engine, deployment
