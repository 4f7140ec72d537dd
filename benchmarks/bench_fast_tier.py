"""What the fast tier costs and how well it ranks: `make bench-fast-tier`.

    python -m benchmarks.bench_fast_tier [--rounds 24]

1. The noise of a round (as loaded against itself, and a fast candidate against itself), and with it the rounds, pairs of windows (two a
   row in a round) and seconds that a 5 % effect takes at 80 % power by the sequential test at alpha 2 %.
2. Kendall's tau between the fast tier (fixed rows) and the slow tier (replayed chat traffic) over parts of the catalogue, each paired
   with the same incumbent.

A line for each on stderr, one JSON line last on stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from typing import Any

from benchmarks.shapes import catalogue_candidate, deployment_of, loaded_engine, prepare_model, probe_hardware
from engines.decoder_engine import DecoderEngine
from hotpass.decode import json_safe
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, MeasureResult, Purpose, Stopping, Tier
from hotpass.stats import kendall_tau, rounds_for, rounds_of, weighted_round
from hotpass.traffic import read_traffic
from hotpass.traffic.shapes import shape_table

EFFECT, ALPHA, POWER = math.log(1.05), 0.02, 0.8
PAIRS_A_ROUND = 2
"""Of windows for each row: a block is ABBA or BAAB."""
RANKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cpp-model", {"weights_as": "gguf"}),
    ("cpp-model", {"weights_as": "fp32"}),
    ("lean-model", {}),
    ("lean-prepacked", {}),
    ("fused-gate-up", {}),
    ("attention-bmm", {}),
)


def main() -> None:
    options = _arguments()
    hardware, model = probe_hardware("cpu"), prepare_model("smollm2-135m")
    table = shape_table(read_traffic("chat", max_context=model.max_context), 1, max_rows=4)
    deployment = deployment_of(model, hardware, table.rows)
    with loaded_engine(deployment) as engine:
        noise = {
            "as loaded": _noise(engine, deployment, AS_LOADED, options.rounds),
            "cpp-model gguf": _noise(
                engine, deployment, catalogue_candidate(*RANKED[0], dtype=model.dtype), options.rounds
            ),
        }
        tau = _tau(engine, deployment, options.replays)
        layers = [len(cut) for cut in engine.cuts]
    line = {"bench": "fast-tier", "layers": layers, "noise": noise, **tau}
    print(json.dumps(json_safe(line)))


def _noise(engine: DecoderEngine, deployment: Deployment, candidate: Candidate, rounds: int) -> dict[str, float]:
    start = time.perf_counter()
    result = engine.measure(_order(deployment, candidate, candidate, Tier.FAST, rounds, 300.0))
    seconds = result.phases_ms.get("measure", (time.perf_counter() - start) * 1e3) / 1e3
    ratios = [weighted_round(group) for group in rounds_of(result.blocks)]
    sigma = statistics.stdev(ratios)
    needed = rounds_for(EFFECT, sigma, ALPHA, POWER)
    per_round = seconds / len(ratios)
    pairs = needed * PAIRS_A_ROUND * len(deployment.shapes.rows)
    found = {
        "sigma": sigma,
        "bias": statistics.mean(ratios),
        "seconds_a_round": per_round,
        "rounds_for_5_percent": needed,
        "pairs_for_5_percent": pairs,
        "seconds_for_5_percent": needed * per_round,
    }
    _say(
        f"{candidate.label}: sigma {sigma:.4f} a round of {per_round:.2f} s; a 5 % effect takes {needed} rounds, "
        f"{pairs} pairs, {needed * per_round:.0f} s"
    )
    return found


def _tau(engine: DecoderEngine, deployment: Deployment, replays: int) -> dict[str, Any]:
    fast, slow, names = [], [], []
    for part, params in RANKED:
        candidate = catalogue_candidate(part, params, deployment.model.dtype)
        quick = engine.measure(_order(deployment, AS_LOADED, candidate, Tier.FAST, 4, 240.0))
        real = engine.measure(_order(deployment, AS_LOADED, candidate, Tier.SLOW, replays, 480.0))
        if quick.failure or real.failure:
            _say(f"{candidate.label}: {(quick.failure or real.failure).message}")  # type: ignore[union-attr]
            continue
        names.append(candidate.label)
        fast.append(_mean_ratio(quick))
        slow.append(statistics.mean(replay.log_ratio for replay in real.replays))
        _say(f"{candidate.label}: fast {math.exp(fast[-1]):.2f} x, slow {math.exp(slow[-1]):.2f} x")
    return {
        "tau": kendall_tau(fast, slow),
        "ranked": [
            {"candidate": name, "fast": math.exp(a), "slow": math.exp(b)}
            for name, a, b in zip(names, fast, slow, strict=True)
        ],
    }


def _mean_ratio(result: MeasureResult) -> float:
    return statistics.mean(weighted_round(group) for group in rounds_of(result.blocks))


def _order(
    deployment: Deployment, incumbent: Candidate, candidate: Candidate, tier: Tier, rounds: int, seconds: float
) -> Assignment:
    return Assignment(
        incumbent=incumbent,
        candidate=candidate,
        tier=tier,
        purpose=Purpose.REMEASURE,
        rows=deployment.shapes.rows,
        seed=11,
        deadline_seconds=seconds,
        stopping=Stopping(min_rounds=rounds, max_rounds=rounds),
        replay_requests=2 if tier is Tier.SLOW else 0,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16, help="rounds of A/A")
    parser.add_argument("--replays", type=int, default=2, help="ABBA blocks of replays for each candidate")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"bench-fast-tier · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
