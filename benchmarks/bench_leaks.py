"""Whether an engine grows while candidates come and go: `make bench-leaks`.

    python -m benchmarks.bench_leaks [--rounds 1000] [--small]

Twenty candidates are put on in turn, answer two tokens, and are taken off, a thousand times in one child. After each reload: memory that
is the child's own, descriptors and threads of the child, the keeper, the zygote and this process, read from /proc. The slope is Theil and
Sen's (the median of slopes between pairs), so that one allocation does not make it, over all reloads but the first tenth, in which
allocators and caches fill. Lines on stderr; one JSON line last on stdout, and one after every tenth of the reloads (`partial: true`), so
that a run cut short has said what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines_at_hand import engine_at_hand
from benchmarks.planted import copy
from benchmarks.shapes import DECODE_1, catalogue_candidate
from engines.decoder_engine import DecoderEngine
from hotpass.decode import json_safe
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import Side

CATALOGUE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention-bmm", {}), ("attention-bmm", {"threads": 1}), ("fused-qkv", {}), ("fused-gate-up", {}), ("lean-model", {}),
    ("lean-model", {"kv_dtype": "bfloat16"}), ("prepacked-head", {}), ("norm-fused", {}),
)  # fmt: skip
"""(part, settings) of what is reloaded beside copies: hot, with derived weights, with another KV pool, with other threads."""
NUM_CANDIDATES = 20
GOAL_MB_A_RELOAD = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What one process holds."""

    own_mb: float
    """Resident pages that are not shared with the keeper's files: anonymous memory."""
    descriptors: int
    threads: int


def main() -> None:
    options = _arguments()
    with engine_at_hand((DECODE_1,), small=options.small) as (engine, deployment):
        taken = _reload(engine, _candidates(deployment.model.dtype), options)
    _print_line(options, taken, partial=False)


def _print_line(options: argparse.Namespace, taken: Mapping[str, Sequence[Use]], *, partial: bool) -> None:
    """What is known now."""
    processes = {name: _figures(uses) for name, uses in taken.items()}
    flat = all(found[f"{what}_grown"] <= 0 for found in processes.values() for what in ("descriptors", "threads"))
    line = {
        "bench": "leaks",
        "small": options.small,
        "partial": partial,
        "reloads": len(taken["child"]),
        "of_reloads": options.rounds,
        "candidates": NUM_CANDIDATES,
        "processes": processes,
        "goals": {
            f"slope < {GOAL_MB_A_RELOAD} MB a reload": processes["child"]["slope_mb_a_reload"] < GOAL_MB_A_RELOAD,
            "descriptors and threads flat": flat,
        },
    }
    print(json.dumps(json_safe(line)), flush=True)


def _reload(
    engine: DecoderEngine, candidates: Sequence[Candidate], options: argparse.Namespace
) -> dict[str, list[Use]]:
    stable, rounds = engine._loaded, options.rounds
    child = stable.pair().child.pid
    pids = {"child": child, "keeper": stable.keeper.pid, "zygote": stable.zygote.pid, "judge": os.getpid()}
    taken: dict[str, list[Use]] = {name: [] for name in pids}
    for number in range(rounds):
        engine.install(Side.CANDIDATE, candidates[number % len(candidates)])
        engine.generate(Side.CANDIDATE, [[1, 2, 3]], 2)
        engine.restore()
        if stable.pair().child.pid != child:
            raise SystemExit(f"the child was replaced after {candidates[number % len(candidates)].label}")
        for name, pid in pids.items():
            taken[name].append(use_of(pid))
        if (number + 1) % max(1, rounds // 10) == 0:
            now = taken["child"][-1]
            _say(f"{number + 1} reloads: {now.own_mb:.1f} MB, {now.descriptors} descriptors, {now.threads} threads")
            _print_line(options, taken, partial=True)
    return taken


def use_of(pid: int) -> Use:
    """What a process holds now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Use(
        own_mb=int(status["RssAnon"].split()[0]) / 1024,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
    )


def slope(values: Sequence[float], most_pairs: int = 200) -> float:
    """Theil and Sen's: the median slope between each value and every other one, over at most `most_pairs` values evenly spread."""
    step = max(1, len(values) // most_pairs)
    points = list(enumerate(values))[::step]
    slopes = [(b - a) / (j - i) for place, (i, a) in enumerate(points) for j, b in points[place + 1 :]]
    return statistics.median(slopes) if slopes else 0.0


def _figures(uses: Sequence[Use]) -> dict[str, float]:
    settled = uses[len(uses) // 10 :]
    return {
        "slope_mb_a_reload": slope([use.own_mb for use in settled]),
        "first_mb": settled[0].own_mb,
        "last_mb": settled[-1].own_mb,
        "descriptors_grown": settled[-1].descriptors - settled[0].descriptors,
        "threads_grown": settled[-1].threads - settled[0].threads,
    }


def _candidates(dtype: str) -> list[Candidate]:
    known = [catalogue_candidate(name, {}, dtype, settings) for name, settings in CATALOGUE]
    return known + [copy(number) for number in range(NUM_CANDIDATES - len(known))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000, help="reloads")
    parser.add_argument("--small", action="store_true", help="a tiny model: to try the benchmark, not to read it")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"bench-leaks · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
