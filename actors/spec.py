"""How an engine is asked for: plain data that crosses to the node where the engine will live, and the one place that makes it.

Engines are made where they run, never shipped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from engines.protocol import Engine
from hotpass.canonical import content_hash
from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from hotpass.records.shapes import ShapeRow


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Everything that making an engine takes, beside the deployment that it loads."""

    kind: str
    """`decoder` or `fake`."""
    name: str
    """Of this engine within the campaign, as `decoder-0`."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    threads: int = 0
    """Threads of the deployment as loaded; 0 for the physical cores."""
    cache_dir: str = ""
    """Where built libraries and derived weights are kept; empty for the user's cache."""
    seed: int = 0
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES set before the engine starts; None leaves what the process has."""


def make_engine(spec: EngineSpec) -> Engine:
    """The engine of a spec, not loaded yet. Raises InputError for an unknown kind."""
    if spec.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    if spec.kind == "fake":
        from engines.fake import FakeEngine

        return FakeEngine(
            spec.name, step_time=simulated_step_ms, seed=spec.seed, logit_error=lambda c: 1e-5 if c.parts else 0.0
        )
    if spec.kind == "decoder":
        from engines.decoder_engine import DecoderEngine

        return DecoderEngine(spec.name, device=spec.device, threads=spec.threads or None, seed=spec.seed)
    raise InputError("engine", spec.kind, "is not known", "known: decoder, fake")


def simulated_step_ms(candidate: Candidate, row: ShapeRow) -> float:
    """Step time of the fake engine: 20 ms scaled by the row, and by a factor in [0.6, 1.15) that each part's or setting's
    name and values hash to. Nothing is known about real parts here; it only makes a search that has something to find."""
    time = 20.0 * (1 + 0.02 * row.query_tokens + 1e-4 * row.context_mean)
    names = [f"{use.source.name}{sorted(use.params.items())}" for use in candidate.parts]
    names += [f"{name}={value}" for name, value in candidate.settings.items()]
    for name in names:
        time *= 0.6 + 0.55 * int(content_hash(name)[:8], 16) / 2**32
    return time
