"""What a hot reload, a crash and a hang cost on the fast tier, beside vLLM's cold start in the same run: `make bench-reload`.

    python -m benchmarks.bench_reload [--rounds 5] [--cold-starts 2] [--small]

Each round installs every candidate once on the engine that stays up, measures one round of windows, takes it off and proves the engine
clean; then one candidate crashes in a window and one never comes back. vLLM starts cold (warm page cache) before the first round and
after the last. *Reload* is: source, preparation, derived weights, swap, contexts, taking off, and the proof. The candidate's own first
passes over every row (in which code compiles) stand beside it: they are its result, not the engine's work. Lines on stderr; one JSON
line last on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines import installs
from benchmarks.engines_at_hand import engine_at_hand
from benchmarks.planted import copy, crashing, hanging
from benchmarks.shapes import catalogue_candidate, prepare_model
from engines.decoder_engine import DecoderEngine
from hotpass.decode import json_safe
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, MeasureResult, Purpose, Side, Stopping, Tier
from hotpass.records.shapes import ShapeRow
from hotpass.traffic import read_traffic
from hotpass.traffic.shapes import shape_table

FIRST_PASSES = ("warm-up", "compile", "capture")
OTHERS = ("build", *FIRST_PASSES)
"""Phases of an install that are not the engine's reload: a builder's work, and the candidate's own passes."""
CATALOGUE = ("attention-bmm", "fused-qkv", "fused-gate-up", "lean-model")
HANG_SECONDS = 10.0
COLD_SECONDS = 600


def main() -> None:
    options = _arguments()
    cold = [_vllm_cold(options)] if options.cold_starts else []
    with engine_at_hand(_chat_rows(), small=options.small) as (engine, deployment):
        found = _rounds(engine, deployment, options)
    while len(cold) < options.cold_starts:
        cold.append(_vllm_cold(options))
    print(json.dumps(json_safe({"bench": "reload", "small": options.small, **_figures(found), "vllm_cold_s": cold})))


def _rounds(engine: DecoderEngine, deployment: Deployment, options: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    candidates = [copy(0), *(catalogue_candidate(name, {}, deployment.model.dtype) for name in CATALOGUE)]
    for number in range(options.rounds):
        for candidate in candidates:
            result = engine.measure(_order(deployment, candidate, 600.0))
            if not result.failure:
                _note_reload(found, result)
        _note_fault(found, engine, deployment, number)
        _say(f"round {number + 1}: reload {statistics.median(found['reload_ms']):.0f} ms so far (median)")
    return found


def _note_reload(found: dict[str, list[float]], result: MeasureResult) -> None:
    (report,) = [report for report in result.reloads if report.side is Side.CANDIDATE]
    install = sum(ms for name, ms in report.phases_ms.items() if name not in OTHERS)
    restore, clean = result.phases_ms["restore"], result.phases_ms["clean"]
    found["reload_ms"].append(install + restore + clean)
    found[f"reload_ms {report.actual}"].append(install + restore + clean)
    found["install_ms"].append(install)
    found["restore_ms"].append(restore)
    found["clean_ms"].append(clean)
    found["first_passes_ms"].append(sum(report.phases_ms.get(name, 0.0) for name in FIRST_PASSES))
    for name, ms in report.phases_ms.items():
        found[f"phase {name}"].append(ms)


def _note_fault(found: dict[str, list[float]], engine: DecoderEngine, deployment: Deployment, number: int) -> None:
    """A crash and a hang, each followed by an honest candidate: when there is a result again, and when that candidate is measured."""
    steps = len(deployment.shapes.rows) + 4  # beyond the passes of the install
    for name, candidate, deadline in (
        ("crash", crashing(steps), 600.0),
        ("hang", hanging(steps), HANG_SECONDS),
    ):
        ended = engine.measure(_order(deployment, candidate, deadline))
        over = time.perf_counter()
        late = ended.phases_ms["total"] / 1e3 - deadline if name == "hang" else 0.0
        after = engine.measure(_order(deployment, copy(number + 1), 600.0))
        served = time.perf_counter() - over - after.phases_ms["measure"] / 1e3
        if ended.failure is None or after.failure is not None:
            _say(f"{name}: not as planted ({ended.failure}, then {after.failure})")
            continue
        found[f"{name}_to_first_result_s"].append(max(0.0, late) + after.phases_ms["birth/until first result"] / 1e3)
        found[f"{name}_to_next_candidate_s"].append(max(0.0, late) + served)


def _order(deployment: Deployment, candidate: Candidate, deadline_seconds: float) -> Assignment:
    return Assignment(
        incumbent=AS_LOADED,
        candidate=candidate,
        tier=Tier.FAST,
        purpose=Purpose.REMEASURE,
        rows=deployment.shapes.rows,
        seed=time.time_ns() % 2**31,
        deadline_seconds=deadline_seconds,
        stopping=Stopping(min_rounds=1, max_rounds=1),
    )


def _figures(found: dict[str, list[float]]) -> dict[str, Any]:
    """Median, quartiles and count of everything that was noted."""
    return {name: _summary(values) for name, values in found.items()} | {
        "goals": {
            "reload_ms <= 100": statistics.median(found["reload_ms"]) <= 100,
            "crash_to_first_result_s <= 3": statistics.median(found["crash_to_first_result_s"]) <= 3,
        }
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * [values[0]]
    return {"median": middle, "quartiles": [low, high], "n": len(values)}  # type: ignore[dict-item]


def _chat_rows() -> tuple[ShapeRow, ...]:
    return shape_table(read_traffic("chat", max_context=8192), 1, max_rows=4).rows


def _vllm_cold(options: argparse.Namespace) -> dict[str, Any]:
    """One cold start in vLLM's own environment: total by this process's clock, and its phases."""
    if options.small:
        return {"not measured": "a trial with a tiny model"}
    try:
        python = installs.environment(installs.VLLM, make=False)
    except installs.Absent as absent:
        return {"not measured": str(absent)}
    with tempfile.TemporaryDirectory() as folder:
        _plain_folder(Path(prepare_model("smollm2-135m").folder), Path(folder))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [str(python), "-m", "benchmarks.baselines.cold_vllm", folder]
        start = time.perf_counter()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            cwd=installs.ROOT,
            timeout=COLD_SECONDS,
            check=False,
        )
        seconds = time.perf_counter() - start
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error" in line] or ["without a word"]
        return {"not measured": said[-1].strip()[:300]}
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]  # vLLM logs there, too
    if not told:
        return {"total": seconds, "not measured": "its phases: it printed none"}
    phases = json.loads(told[-1])
    _say(f"vLLM cold: {seconds:.1f} s")
    return {"total": seconds, **phases}


def _plain_folder(source: Path, target: Path) -> None:
    """The model as Hugging Face has it: without the packed blocks, which vLLM would take for more weights."""
    for path in source.iterdir():
        if path.is_file() and path.name not in ("packed.safetensors", "hotpass-model.json"):
            if path.suffix == ".safetensors":
                (target / path.name).symlink_to(path)
            else:
                shutil.copy(path, target)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of all candidates, a crash and a hang")
    parser.add_argument("--cold-starts", type=int, default=2, help="of vLLM; 0 leaves it out")
    parser.add_argument("--small", action="store_true", help="a tiny model: to try the benchmark, not to read it")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"bench-reload · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
