"""One real engine on a tiny model with cuts, and a candidate through it to a verdict: what cheats and honest parts are held against."""

from __future__ import annotations

from pathlib import Path

from engines.decoder_engine import DecoderEngine
from engines.limits import ChildLimits
from engines.prepare.model import prepare_model
from engines.prepare.tiny import make_tiny_model
from engines.program import ReplayRequest
from hotpass.parts import declaration, read_part
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource, Value
from hotpass.records.deployment import Deployment, HardwareRef, Serving, TrafficRef
from hotpass.records.measurement import Assignment, Attempt, MeasureResult, Pairing, Purpose, Stopping, Tier
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from hotpass.settings import numerics_of_settings
from verification.numerics import Band, calibrate
from verification.policy import Policy
from verification.verdict import judge

LAYERS = 4


def row(phase: Phase, num_seqs: int, query_tokens: int, mean: int, longest: int, share: float) -> ShapeRow:
    return ShapeRow(
        phase=phase,
        num_seqs=num_seqs,
        query_tokens=query_tokens,
        context_mean=mean,
        context_max=longest,
        steps_share=share,
        tokens_share=share,
    )


ROWS = (
    row(Phase.DECODE, 2, 2, 12, 16, 0.5),
    row(Phase.DECODE, 1, 1, 20, 20, 0.25),
    row(Phase.PREFILL, 1, 8, 0, 0, 0.25),
)
SHAPES = ShapeTable(rows=ROWS, concurrency=2, chunk_tokens=8, num_steps=10, output_tokens_per_step=1.5)


class Bench:
    """A loaded engine, its band, and what a result amounts to."""

    def __init__(self, folder: Path) -> None:
        self.model = prepare_model(str(make_tiny_model(folder / "model", layers=LAYERS)), cache_dir=folder / "cache")
        self.deployment = Deployment(
            model=self.model,
            traffic=TrafficRef(
                name="none", source_format="preset", content_hash="0", num_requests=1, dropped={}, content_valid=False
            ),
            # A cache of one byte, so that the fast tier has cuts of one and two layers.
            hardware=HardwareRef(
                name="cpu", device="cpu", num_devices=1, isa=(), last_level_cache_bytes=1, memory_bytes=1 << 33
            ),
            serving=Serving(),
            concurrency=2,
            shapes=SHAPES,
        )
        self.engine = DecoderEngine(
            "judged",
            threads=1,
            window_ms=4.0,
            aa_seconds=0.6,
            serving_context=64,
            requests=_requests,
            cache_dir=str(folder / "builds"),
            limits=ChildLimits(memory_bytes=1 << 32),
        )
        self.engine.load(self.deployment, Tier.FAST)
        self.policy = Policy()
        self.band: Band = calibrate(self.engine.reference_noise(), (), self.model.dtype, self.policy)

    def measure(self, candidate: Candidate, tier: Tier = Tier.FAST, **changes: object) -> MeasureResult:
        """Against as loaded, on every row."""
        given: dict[str, object] = {
            "incumbent": AS_LOADED,
            "candidate": candidate,
            "tier": tier,
            "purpose": Purpose.SEARCH,
            "rows": ROWS,
            "seed": 11,
            "deadline_seconds": 120.0,  # nothing here is meant to reach it, on the slowest machine either
            "pairing": Pairing.SIDE_BY_SIDE,
            "stopping": Stopping(min_rounds=3, max_rounds=3),
            "replay_requests": 6,
        }
        return self.engine.measure(Assignment(**{**given, **changes}))  # type: ignore[arg-type]

    def verdict(self, result: MeasureResult) -> Attempt:
        """By the default policy."""
        return judge(result, policy=self.policy, band=self.band, shapes=SHAPES, num_layers=LAYERS)


def candidate_of(
    *sources: PartSource, params: dict[str, Value] | None = None, settings: dict[str, Value] | None = None
) -> Candidate:
    """These parts with one set of parameters, classed as they declare themselves for a float32 model."""
    uses = [declaration(source).bind(source, params) for source in sources]
    kinds = [declaration(use.source).numerics_of(use.params, "float32") for use in uses]
    kinds.append(numerics_of_settings(settings or {}, "float32"))
    return Candidate(parts=tuple(uses), settings=settings or {}, numerics=max(kinds, key=lambda kind: kind.rank))


def planted(path: Path) -> Candidate:
    """The one part of a file."""
    return candidate_of(read_part(path))


def _requests(count: int, seed: int, held_out: bool) -> list[ReplayRequest]:
    """Prompts of 5 to 9 tokens and outputs of 4 or 7, so that steps of many shapes occur."""
    return [
        ReplayRequest(
            request_id=index,
            tokens=tuple((17 * index + 5 * place + seed) % 250 + 1 for place in range(5 + index % 5)),
            output_tokens=4 + 3 * (index % 2),
        )
        for index in range(count)
    ]
