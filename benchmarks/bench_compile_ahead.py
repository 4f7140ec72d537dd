"""What an engine's child spends on a compiled candidate, with and without what a builder compiled ahead: `python -m benchmarks.bench_compile_ahead`.

    python -m benchmarks.bench_compile_ahead [--pairs 3] [--small]

The builder's process compiles once, from an empty cache. Then, in turns, a new child installs the candidate by itself and a new child
installs it with the builder's folder (on every cut, as an attempt does). Lines on stderr; one JSON line last on stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from actors.spec import EngineSpec, make_builder
from benchmarks.engines_at_hand import SMALL_ROWS
from benchmarks.shapes import deployment_of, prepare_model, probe_hardware
from engines.build import CandidateBuilder
from engines.decoder_engine import DecoderEngine
from engines.judge.install import PartFiles
from engines.prepare.tiny import make_tiny_model
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import ReloadReport, Side
from hotpass.traffic import read_traffic
from hotpass.traffic.shapes import shape_table

COMPILED = Candidate(settings={"compile_mode": "default"})
BUILD_SECONDS = 600.0


class _Sometimes:
    """A builder that gives out what it compiled only when told to."""

    def __init__(self, builder: CandidateBuilder) -> None:
        self.builder, self.gives = builder, False

    def __call__(self, candidate: Candidate, seconds: float) -> Sequence[PartFiles]:
        return ()

    def compiled(self, candidate: Candidate) -> Path | None:
        return self.builder.compiled(candidate) if self.gives else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="children of each kind")
    parser.add_argument("--small", action="store_true", help="a tiny model: a trial of the bench, no figure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        deployment = _deployment(Path(cache), small=options.small)
        made = make_builder(EngineSpec(kind="decoder", name="bench", cache_dir=cache), deployment)
        assert isinstance(made, CandidateBuilder)
        sometimes = _Sometimes(made)
        start = time.perf_counter()
        folder = made.compile_ahead(COMPILED, (), BUILD_SECONDS)
        build_s = time.perf_counter() - start
        assert folder is not None
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        _say(f"the builder compiled for {build_s:.1f} s: {size / 1e6:.1f} MB")
        seconds: dict[bool, list[float]] = {False: [], True: []}
        with DecoderEngine("bench", builder=sometimes, aa_seconds=0.3) as engine:
            engine.load(deployment)
            for number in range(2 * options.pairs):
                sometimes.gives = number % 4 in (1, 2)  # ABBA
                seconds[sometimes.gives].append(_installed(engine, expects_hit=sometimes.gives))
    line = {
        "bench": "compile-ahead",
        "small": options.small,
        "builder_s": round(build_s, 2),
        "megabytes": round(size / 1e6, 2),
        "child_alone_s": _summary(seconds[False]),
        "child_with_builder_s": _summary(seconds[True]),
    }
    print(json.dumps(line))


def _deployment(folder: Path, *, small: bool) -> Deployment:
    hardware = probe_hardware("cpu")
    if small:
        model = prepare_model(str(make_tiny_model(folder / "model")), cache_dir=folder / "cache")
        return deployment_of(model, hardware, SMALL_ROWS)
    rows = shape_table(read_traffic("chat", max_context=8192), 1, max_rows=4).rows
    return deployment_of(prepare_model("smollm2-135m"), hardware, rows)


def _installed(engine: DecoderEngine, *, expects_hit: bool) -> float:
    """Seconds of one install of the compiled candidate in a new child."""
    engine.renew()
    start = time.perf_counter()
    report = engine.install(Side.CANDIDATE, COMPILED)
    seconds = time.perf_counter() - start
    _say(f"{'with' if expects_hit else 'without'} the builder's folder: {seconds:.2f} s ({_phases(report)})")
    if ("compile" in report.phases_ms) is expects_hit:
        raise SystemExit(
            "the child compiled what the builder had made" if expects_hit else "the child compiled nothing"
        )
    engine.restore()
    return seconds


def _phases(report: ReloadReport) -> str:
    return ", ".join(f"{name} {ms / 1e3:.2f}" for name, ms in report.phases_ms.items() if ms >= 10)


def _summary(values: Sequence[float]) -> dict[str, object]:
    return {"median": round(statistics.median(values), 2), "all": [round(value, 2) for value in values]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
