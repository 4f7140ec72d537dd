"""What hotpass finds for science models with the very same bits: `python -m benchmarks.bench_science`.

    python -m benchmarks.bench_science [--models silero-vad antiberty] [--rounds 24] [--cold-rounds 24]

Every bit-identical part of the catalogue that applies to the model, each with its default parameters, is paired with the module as loaded
on its examples and judged as a campaign would. The fastest is measured again cold: each side in a process of its own, interleaved, on
inputs never used before. That number is the model's, with its interval by a bootstrap over rounds; `null` where nothing was both equal in
every bit and faster. An A/A row is beside it. Lines on stderr; one JSON line last on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from actors.spec import EngineSpec, make_engine
from cluster.resolve import module_load
from engines.module_engine import ModuleEngine
from engines.probe import probe_hardware
from hotpass.decode import json_safe
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics
from hotpass.records.deployment import Deployment, HardwareRef, Serving
from hotpass.records.measurement import Assignment, Attempt, MeasuredBlock, Pairing, Purpose, Stopping, Tier, Verdict
from hotpass.stats import speedup_of_blocks
from search.catalogue import applicable, load_catalogue
from verification.numerics import Band, calibrate
from verification.policy import Policy
from verification.verdict import judge

MODELS = ("silero-vad", "antiberty")
POLICY = Policy(numerics=Numerics.BIT_IDENTICAL)
DEADLINE_SECONDS = 300.0


def main() -> None:
    options = _arguments()
    hardware = probe_hardware("cpu")
    found = {name: _science(name, hardware, options) for name in options.models}
    line = {"bench": "science", "hardware": hardware.name, "numerics": Numerics.BIT_IDENTICAL, "models": found}
    print(json.dumps(json_safe(line)))


def _science(name: str, hardware: HardwareRef, options: argparse.Namespace) -> dict[str, Any]:
    """One model: every candidate paired, the best of them cold."""
    model, traffic, shapes = module_load(name, _say)
    deployment = Deployment(
        model=model, traffic=traffic, hardware=hardware, serving=Serving(engine="module"), concurrency=1, shapes=shapes
    )
    engine = make_engine(EngineSpec(kind="module", name=name), deployment)
    assert isinstance(engine, ModuleEngine)
    try:
        engine.load(deployment, Tier.FAST)
        band = calibrate(engine.reference_noise(), (), model.dtype, POLICY)
        tried = {}
        for candidate in (AS_LOADED, *candidates(deployment)):
            tried[candidate] = _measured(engine, deployment, band, candidate, options.rounds, cold=False)
            _say(f"{name}: {candidate.label}: {tried[candidate]['said']}")
        faster = [c for c, row in tried.items() if row["verdict"] is Verdict.FASTER]
        best = max(faster, key=lambda c: tried[c]["speedup"]["value"], default=None)
        cold = _measured(engine, deployment, band, best, options.cold_rounds, cold=True) if best else None
        _say(f"{name}: cold: {best.label if best else 'nothing to measure'} {cold['said'] if cold else ''}")
    finally:
        engine.close()
    return {
        "winner": best.label if best and cold and cold["verdict"] is Verdict.FASTER else None,
        "cold": cold,
        "paired": {candidate.label: row for candidate, row in tried.items()},
    }


def candidates(deployment: Deployment) -> Iterator[Candidate]:
    """Bit-identical parts that apply, one a candidate."""
    for source in load_catalogue("cpu"):
        declared = declaration(source)
        use = declared.bind(source)
        exact = declared.numerics_of(use.params, deployment.model.dtype) is Numerics.BIT_IDENTICAL
        if exact and applicable(source, deployment, compiler=True) is None:
            yield Candidate(parts=(use,), numerics=Numerics.BIT_IDENTICAL)


def _measured(
    engine: ModuleEngine, deployment: Deployment, band: Band, candidate: Candidate, rounds: int, *, cold: bool
) -> dict[str, Any]:
    order = Assignment(
        incumbent=AS_LOADED,
        candidate=candidate,
        tier=Tier.FAST,
        purpose=Purpose.COLD if cold else Purpose.AA if candidate == AS_LOADED else Purpose.SEARCH,
        rows=deployment.shapes.rows,
        seed=11 if cold else 7,
        deadline_seconds=DEADLINE_SECONDS,
        pairing=Pairing.TWO_PROCESSES if cold else Pairing.SIDE_BY_SIDE,
        stopping=Stopping(min_rounds=min(3, rounds), max_rounds=rounds),
    )
    result = engine.measure(order)
    attempt = judge(result, policy=POLICY, band=band, shapes=deployment.shapes, num_layers=deployment.model.num_layers)
    return {
        "verdict": attempt.verdict,
        "said": f"{attempt.verdict}: {attempt.reason}",
        "speedup": _speedup(attempt, result.blocks),
        "rows": {row.key: _row(result.blocks, row.key) for row in deployment.shapes.rows} if result.blocks else {},
        "bits_equal": all(check.bit_equal for check in result.checks if check.against == "incumbent"),
        "rounds": attempt.rounds,
    }


def _speedup(attempt: Attempt, blocks: tuple[MeasuredBlock, ...]) -> dict[str, Any] | None:
    """Over the module as loaded, weighted by the examples' shares; None for what was not timed."""
    if attempt.speedup is None:
        return None
    return _span(blocks)


def _row(blocks: tuple[MeasuredBlock, ...], key: str) -> dict[str, Any]:
    return _span(tuple(block for block in blocks if block.row.key == key))


def _span(blocks: tuple[MeasuredBlock, ...]) -> dict[str, Any]:
    found = speedup_of_blocks(blocks)
    return {"value": round(found.value, 3), "ci95": [round(found.low, 3), round(found.high, 3)]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="aliases of modules")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of each pair, at most")
    parser.add_argument("--cold-rounds", type=int, default=24, help="rounds of the cold pair, at most")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"bench-science · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
