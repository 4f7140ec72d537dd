"""hotpass's best parts against the deployment as loaded, transformers' own loops, and external engines: `make bench-decode`.

    python -m benchmarks.bench_decode [--model smollm2-135m --model smollm2-135m-bf16] [--rounds 8] [--budget-seconds 240]

Batch 1 and 8 decode at a context of 256, and a prompt of 512 tokens. Everything of transformers and hotpass is paired in this run, in
ABBA rounds beside the deployment as loaded; classes and accuracy stand beside each ratio. External engines (llama.cpp, OpenVINO, vLLM)
come from `make bench-baselines` on the same machine, which paired them with hotpass's part in its own turns; a ratio is marked unpaired
where there were none. Each goal is printed as met or missed, against the best baseline that is no more accurate. A table on stderr; one
JSON line last on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench_baselines import cached_results
from benchmarks.shapes import POINTS, catalogue_candidate, deployment_of, loaded_engine, prepare_model, probe_hardware
from cluster.floors import bounds_ms
from engines.decoder_engine import DecoderEngine
from hotpass.decode import json_safe
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, MeasuredBlock, Pairing, Purpose, Stopping, Tier
from hotpass.records.shapes import ShapeRow
from hotpass.stats import speedup_of_blocks
from verification.numerics import reference_checks, summary

OURS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "smollm2-135m": [("fp32", {}), ("gguf", {}), ("gguf-a8", {})],
    "smollm2-135m-bf16": [("bf16", {}), ("bf16-a16", {}), ("int8", {})],
}
"""Model → storages of `cpp-model` to measure."""
OURS_NAME = "hotpass cpp-model"
GOALS: dict[str, dict[str, float]] = {
    "smollm2-135m": {"decode-1": 2.6, "decode-8": 2.0, "prefill-512": 2.0},
    "smollm2-135m-bf16": {"decode-1": 1.6, "decode-8": 2.0, "prefill-512": 2.0},
}
"""Model → point → times the best baseline that is no more accurate."""
BOUND_GOALS = {("smollm2-135m-bf16", "decode-1"): 0.8}
"""(model, point) → share of the bandwidth bound."""
AS_ACCURATE = 2e-4
"""Largest logit differences below this are float32 in another order: neither is the more accurate."""
TRANSFORMERS = (
    "transformers-eager-fp32",
    "transformers-sdpa-fp32",
    "transformers-eager-bf16",
    "transformers-sdpa-bf16",
)


def main() -> None:
    options = _arguments()
    hardware = probe_hardware("cpu")
    external = cached_results(hardware)
    found: dict[str, Any] = {}
    for name in options.model:
        deployment = deployment_of(prepare_model(name), hardware)
        _say(f"{name}: loading")
        with loaded_engine(deployment) as engine:
            found[name] = _compared(engine, deployment, options.rounds, options.budget_seconds, external)
        _print_table(name, found[name])
    missing = sorted({"llama.cpp", "openvino", "vllm"} - {result["engine"] for result in external})
    print(
        json.dumps(json_safe({"bench": "decode", "hardware": hardware.name, "models": found, "not_measured": missing}))
    )


def _compared(
    engine: DecoderEngine, deployment: Deployment, rounds: int, seconds: float, external: list[dict[str, Any]]
) -> dict[str, Any]:
    model, bounds = deployment.model, bounds_ms(deployment)
    rows: list[dict[str, Any]] = []
    for weights_as, settings in OURS[model.name]:
        candidate = catalogue_candidate("cpp-model", {"weights_as": weights_as}, model.dtype, dict(settings))
        result = engine.measure(_order(candidate, deployment, rounds, seconds))
        checks = summary(reference_checks(result))
        if result.failure:
            rows.append({"who": f"{OURS_NAME} {weights_as}", "failure": result.failure.message})
            continue
        row = _row(f"{OURS_NAME} {weights_as}", candidate.numerics, checks, result.blocks, deployment, bounds)
        rows.append({**row, "weights_as": weights_as})
    for name in TRANSFORMERS:
        _say(f"{model.name}: {name}")
        measured = engine.measure_baseline(name, deployment.shapes.rows, seed=7, deadline_seconds=seconds)
        if measured.failure:
            rows.append({"who": name, "failure": measured.failure.message})
            continue
        checks = summary([check for check in measured.checks if check.against == "reference"])
        rows.append(_row(name, measured.numerics, checks, measured.blocks, deployment, bounds))
    rows += [_external_row(found) for found in external if found.get("points") and found["model"] == model.name]
    return {"rows": rows, "goals": goals(model.name, rows)}


def _order(candidate: Candidate, deployment: Deployment, rounds: int, seconds: float) -> Assignment:
    return Assignment(
        incumbent=AS_LOADED,
        candidate=candidate,
        tier=Tier.FAST,
        purpose=Purpose.REMEASURE,
        rows=deployment.shapes.rows,
        seed=time.time_ns() % 2**31,
        deadline_seconds=seconds,
        pairing=Pairing.SIDE_BY_SIDE,
        stopping=Stopping(min_rounds=rounds, max_rounds=rounds),
    )


def _row(
    who: str,
    numerics: Numerics,
    checks: dict[str, float],
    blocks: tuple[MeasuredBlock, ...],
    deployment: Deployment,
    bounds: dict[str, float],
) -> dict[str, Any]:
    points: dict[str, Any] = {}
    for point, shape in POINTS.items():
        own = [block for block in blocks if block.row.key == shape.key]
        if not own:
            continue
        ratio = speedup_of_blocks(own)
        ms = sum(block.candidate_step_ms for block in own) / len(own)
        points[point] = {
            "tokens_per_s": _tokens(shape) / ms * 1e3,
            "vs_loaded": ratio.value,
            "ci95": [ratio.low, ratio.high],
            "bound_fraction": bounds[shape.key] / ms if shape.key in bounds else None,
        }
    return {"who": who, "paired": True, "numerics": numerics.value, "max_abs": checks.get("max_abs"), "points": points}


def _external_row(result: dict[str, Any]) -> dict[str, Any]:
    points = {
        name: {key: point[key] for key in ("tokens_per_s", "hotpass_over_it") if key in point}
        for name, point in result["points"].items()
        if point.get("tokens_per_s")
    }
    return {
        "who": f"{result['engine']} {result['variant']}",
        "paired": False,
        "max_abs": result["max_abs_logit_diff"],
        "is_baseline": result["baseline"],
        "points": points,
    }


def goals(model: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each goal of a model: hotpass's best over the best baseline that is no more accurate, and whether that is enough.

    `met` is null where no baseline was measured; the ratio is a paired one (`paired`) where the two were measured in turns.
    """
    found = []
    for point, wanted in GOALS[model].items():
        ours = [row for row in rows if row["who"].startswith(OURS_NAME) and point in row.get("points", {})]
        compared = [item for row in ours if (item := _over_best(row, rows, point)) is not None]
        best = max(compared, key=lambda item: float(item["ratio"]), default=None)
        share = BOUND_GOALS.get((model, point))
        bounds = [row["points"][point].get("bound_fraction") or 0.0 for row in ours]
        enough = best is not None and best["ratio"] >= wanted and (share is None or max(bounds) >= share)
        found.append(
            {
                "point": point,
                "goal": wanted,
                "bound_goal": share,
                "bound_fraction": max(bounds, default=None),
                "met": enough if best is not None else None,
                **(best or {"ratio": None}),
            }
        )
    return found


def _over_best(ours: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], point: str) -> dict[str, Any] | None:
    """One of hotpass's rows over the fastest baseline that is no more accurate; None when there is none."""
    rivals = [
        _ratio(ours, row, point)
        for row in rows
        if not row["who"].startswith(OURS_NAME)
        and row.get("is_baseline", True)
        and point in row.get("points", {})
        and _no_more_accurate(row.get("max_abs"), ours.get("max_abs"))
    ]
    return min(rivals, key=lambda rival: float(rival["ratio"]), default=None)


def _no_more_accurate(rival: float | None, ours: float | None) -> bool:
    """A rival whose accuracy is not known counts as one that is not better."""
    if rival is None or ours is None:
        return True
    return max(rival, AS_ACCURATE) >= max(ours, AS_ACCURATE)


def _ratio(ours: Mapping[str, Any], rival: Mapping[str, Any], point: str) -> dict[str, Any]:
    """By turns where they were measured so, else of the two speeds."""
    mine, other = ours["points"][point], rival["points"][point]
    about = {"ours": ours["who"], "over": rival["who"]}
    beside = other.get("hotpass_over_it", {}).get(ours.get("weights_as"))
    if beside is not None:
        return {"ratio": beside["median"], "paired": True, **about}
    both_in_session = rival["paired"] and "vs_loaded" in mine and "vs_loaded" in other
    if both_in_session:
        return {"ratio": mine["vs_loaded"] / other["vs_loaded"], "paired": True, **about}
    return {"ratio": mine["tokens_per_s"] / other["tokens_per_s"], "paired": False, **about}


def _print_goal(model: str, goal: Mapping[str, Any]) -> None:
    bound = f" and {goal['bound_goal']:.0%} of the bound" if goal["bound_goal"] else ""
    wanted = f"{model} {goal['point']}: goal {goal['goal']:.1f} times the best baseline that is no more accurate{bound}"
    if goal["ratio"] is None:
        _say(f"{wanted}: nothing to compare with")
        return
    reached = f"{goal['ours']} is {goal['ratio']:.2f} x {goal['over']}{'' if goal['paired'] else ' (unpaired)'}"
    if goal["bound_goal"] and goal["bound_fraction"]:
        reached += f", {goal['bound_fraction']:.0%} of the bound"
    _say(f"{wanted}: {'met' if goal['met'] else 'MISSED'} ({reached})")


def _tokens(shape: ShapeRow) -> int:
    return shape.query_tokens


def _print_table(name: str, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: tokens/s (ratio to as loaded)")
    for column in ("", "class", "largest logit difference", *POINTS):
        table.add_column(column)
    for row in found["rows"]:
        if "failure" in row:
            table.add_row(row["who"], "failed", row["failure"][:60])
            continue
        cells = []
        for point in POINTS:
            value = row["points"].get(point)
            ratio = f" ({value['vs_loaded']:.2f} x)" if value and "vs_loaded" in value else ""
            cells.append(f"{value['tokens_per_s']:.1f}{ratio}" if value else "-")
        error = row.get("max_abs")
        table.add_row(row["who"], row.get("numerics", "unpaired"), f"{error:.2g}" if error is not None else "-", *cells)
    Console(stderr=True).print(table)
    for goal in found["goals"]:
        _print_goal(name, goal)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=sorted(OURS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="deadline of one measurement")
    options = parser.parse_args()
    options.model = options.model or sorted(OURS)
    return options


def _say(text: str) -> None:
    print(f"bench-decode · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
