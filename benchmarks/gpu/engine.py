"""The decoder engine with device=cuda from end to end, in its four processes: random weights in the shape of SmolLM2-135M.

    keeper places the weights ─► children map them ─► as loaded against graphs, a Triton part ─► candidates that write, leak, crash
                                                                                              ─► and after each: clean, unharmed

One engine for all of it, since that it goes on is what is checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.models import SHAPES, planted
from benchmarks.gpu.outcome import Figures, Outcome, Place, Skipped, expect, run_check
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.deployment import Deployment, HardwareRef, Serving, TrafficRef
from hotpass.records.measurement import Assignment, MeasureResult, Purpose, Stopping, Tier
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from search.catalogue import find_part

STOPPING = Stopping(min_rounds=4, max_rounds=8)
DEADLINE_SECONDS = 240.0
LEAK_BYTES = 64 << 20

_WRITE = (
    "[p.data.view(-1)[:2].add_(1) for p in gc.get_objects() if type(p) is torch.nn.Parameter and p.dim() == 1 and p.is_cuda]; "
    "return self.before(*args, **kwargs)"
)
PLANTED: Mapping[str, Candidate] = {
    "writes": planted("model.norm", _WRITE),
    "leaks": planted(
        "model.norm", "return self.before(*args, **kwargs)",
        prepare=f"torch.kept = getattr(torch, 'kept', []) + [torch.zeros({LEAK_BYTES}, dtype=torch.uint8, device=ctx.device)]",
    ),
    "crashes": planted("model.norm", "os._exit(3)"),
    "breaks its context": planted("model.norm", "return args[0][torch.full((1,), 1 << 40, device=args[0].device)]"),
}  # fmt: skip
"""What must be found, each for its own reason. The last reads far out of bounds: every later call of that process fails."""


def check_engine(place: Place, shape: str = "135m") -> list[Outcome]:
    """Outcomes of one engine's life; those after it could not be loaded are skipped."""
    outcomes: list[Outcome] = []
    try:
        with _engine(place, shape) as (measure, facts, phases):
            outcomes.append(run_check("engine: loads", lambda _: phases, place))
            outcomes.append(run_check("engine: children map the weights", lambda _: _mapped(facts()), place))
            for name, check in _checks(measure).items():
                outcomes.append(run_check(f"engine: {name}", lambda _, check=check: check(), place))  # type: ignore[misc]
    except Exception as error:
        outcomes.append(run_check("engine: loads" if not outcomes else "engine: closes", _raiser(error), place))
    return outcomes


Measure = Callable[[Candidate], MeasureResult]


def _checks(measure: Measure) -> dict[str, Callable[[], Figures]]:
    def unharmed() -> None:
        """As loaded against itself is clean, and its weights are as they were."""
        result = measure(replace(AS_LOADED, settings={"max_batch": 1}))
        expect(result.failure is None, f"the next candidate: {result.failure}")
        expect(result.clean is not None and result.clean.clean, f"the next candidate is not clean: {result.clean}")
        expect(result.weights_unchanged, "the weights are not as they were")

    def sound(candidate: Candidate) -> Figures:
        result = measure(candidate)
        expect(result.failure is None, f"{result.failure}")
        expect(result.clean is not None and result.clean.clean, f"not clean: {result.clean}")
        expect(result.weights_unchanged, "called a write to the weights")
        ratios = [block.log_ratio for block in result.blocks]
        assert result.gpu is not None
        return {
            "median_log_ratio": sorted(ratios)[len(ratios) // 2], "blocks": len(ratios), "noise_floor": result.noise_floor,
            "clock_ratio": min(block.child_clock_ratio for block in result.blocks), "sm_clock_mhz": list(result.gpu.sm_clock_mhz),
            "weights_check_ms": result.phases_ms["device weights"], "activation": sum(result.activation.values()),
        }  # fmt: skip

    def writes() -> Figures:
        result = measure(PLANTED["writes"])
        expect(not result.weights_unchanged, "the write was not found")
        reasons = result.clean.reasons if result.clean is not None else ()
        expect(any("shared weight" in reason for reason in reasons), f"found, but not told: {reasons}")
        unharmed()
        return {"reload_ms": result.phases_ms["weights loaded again"]}

    def leaks() -> Figures:
        result = measure(PLANTED["leaks"])
        reasons = result.clean.reasons if result.clean is not None else ()
        expect(any("device memory grew" in reason for reason in reasons), f"64 MiB were kept, and told was {reasons}")
        unharmed()
        return {}

    def fails(name: str) -> Figures:
        result = measure(PLANTED[name])
        expect(result.failure is not None, "no failure was recorded")
        unharmed()
        assert result.failure is not None
        return {"recorded": f"{result.failure.kind}: {result.failure.message}"[:120]}

    source = find_part("triton-decode")
    triton = Candidate(parts=(declaration(source).bind(source),))
    return {
        "as loaded": lambda: sound(replace(AS_LOADED, settings={"max_batch": 1})),
        "graphs": lambda: sound(Candidate(settings={"cuda_graphs": True})),
        "triton-decode": lambda: sound(triton),
        "triton-decode with graphs": lambda: sound(replace(triton, settings={"cuda_graphs": True})),
        "planted write": writes,
        "planted leak": leaks,
        "crash": lambda: fails("crashes"),
        "broken context": lambda: fails("breaks its context"),
    }


@contextmanager
def _engine(place: Place, shape: str) -> Iterator[tuple[Measure, Callable[[], Mapping[str, str]], Mapping[str, float]]]:
    place.needs_gpu("no engine on a device")
    from engines.cuda.timing import l2_bytes
    from engines.decoder_engine import DecoderEngine
    from engines.prepare import prepare_model
    from engines.prepare.tiny import make_tiny_model

    folder = Path(place.folder) / "engine"
    made = make_tiny_model(folder / "model", **SHAPES[shape], max_context=2048, dtype="bfloat16")
    rows = (
        ShapeRow(
            phase=Phase.DECODE, num_seqs=4, query_tokens=4, context_mean=256, context_max=300, steps_share=0.9, tokens_share=0.5
        ),
        ShapeRow(
            phase=Phase.PREFILL, num_seqs=1, query_tokens=256, context_mean=0, context_max=0, steps_share=0.1, tokens_share=0.5
        ),
    )  # fmt: skip
    device = torch.device(place.device)
    total = torch.cuda.get_device_properties(device).total_memory
    deployment = Deployment(
        model=prepare_model(str(made), cache_dir=folder / "cache"),
        traffic=TrafficRef(
            name="none", source_format="preset", content_hash="0", num_requests=1, dropped={}, content_valid=False
        ),
        hardware=HardwareRef(
            name=torch.cuda.get_device_name(device), device="cuda", num_devices=1, isa=(),
            last_level_cache_bytes=l2_bytes(device), memory_bytes=total,
        ),
        serving=Serving(),
        concurrency=4,
        shapes=ShapeTable(rows=rows, concurrency=4, chunk_tokens=256, num_steps=10, output_tokens_per_step=3.6),
    )  # fmt: skip
    seeds = random.Random(5)
    with DecoderEngine("gpu-check", cache_dir=str(folder / "built"), audited_share=0.0, aa_seconds=1.0) as engine:
        phases = engine.load(deployment, Tier.FAST)

        def measure(candidate: Candidate) -> MeasureResult:
            return engine.measure(
                Assignment(
                    incumbent=AS_LOADED, candidate=candidate, tier=Tier.FAST, purpose=Purpose.SEARCH, rows=rows,
                    seed=seeds.getrandbits(31), deadline_seconds=DEADLINE_SECONDS, stopping=STOPPING,
                )
            )  # fmt: skip

        yield measure, lambda: engine.facts, {name: round(ms, 1) for name, ms in phases.items()}


def _mapped(facts: Mapping[str, str]) -> Figures:
    expect(facts["weights"] == "the keeper's device memory", f"children have {facts['weights']}")
    return dict(facts)


def _raiser(error: Exception) -> Callable[[Place], Figures]:
    def check(_: Place) -> Figures:
        raise Skipped(str(error)) if isinstance(error, Skipped) else error

    return check
