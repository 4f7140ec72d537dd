"""How far the cost model's predictions can be trusted, and how fast it makes them. One JSON line last.

    python -m benchmarks.bench_costmodel --data ../shared/data [--aiconfigurator-python PYTHON | --aiconfigurator ANSWERS.csv]

* Every row of `engine_measurements/aiconfigurator_silicon_sample.csv.gz`: zero-shot (kernel tables and roofline), and calibrated on
  rows of other architectures than the one scored (factors, whether they are kept, and interval widths alike). These rows were in
  sight while the model was made: the interval widths (`SERVING_SPREAD`), the parts of a calibration and their priors, which tables
  stand in for broken ones, the launches of small kernels, the lengths that a harness draws, and the form of the closed loop were
  chosen by looking at their errors, so it is no blind test. No constant was fitted to a single row or model.
* aiconfigurator beside it on the rows that both answer, told the same of each (deployments completed alike): asked through an interpreter
  that has it (`benchmarks/aiconfigurator_answers.py`, all rows in minutes), or from a file of its answers (`id`, `tpot_ms`, `ttft_ms`). Its sweep
  and ours are timed in turns, under the same load, each as a process of its own. Null without either.
* MLPerf Inference v4.1, Llama-2-70B Offline on H100 and H200, zero-shot.
* 10,000 plans and more for DeepSeek-V4-Flash on `gb200-nvl72`, warm and as a cold process.

Needs the extra `nvidia-tables`. After Ctrl-C the line has what was known by then, and says `interrupted`. Pipeline and decode context parallelism have no measured rows: they are unvalidated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from costmodel.calibration import TARGETS, leave_one_out
from costmodel.configs import load_graph
from costmodel.graph import graph_of
from costmodel.inferencex import completed
from costmodel.machine import parse_machine
from costmodel.measured import predict_rows, read_rows
from costmodel.operators import tables_folder
from costmodel.ranking import plan
from costmodel.records import Asked
from costmodel.serving import ACCEPTED, Load
from costmodel.validate import Validation, validate

LLAMA2_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80,
    "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
OPEN_ORCA = Load(input_tokens=294.0, output_tokens=294.0)
"""Mean lengths of MLPerf's Llama-2-70B workload (MLCommons, Inference v4.0, Llama-2-70B task description)."""
ACCELERATORS = {"NVIDIA H100-SXM-80GB": "h100-sxm", "NVIDIA H200-SXM-141GB": "h200"}
SPEED_CASE = ("deepseek-ai/DeepSeek-V4-Flash", "gb200-nvl72", Load(input_tokens=1024.0, output_tokens=1024.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HOTPASS_DATA", "../shared/data")))
    parser.add_argument("--aiconfigurator", type=Path, help="CSV of its answers: id, tpot_ms, ttft_ms")
    parser.add_argument("--aiconfigurator-python", type=Path, help="an interpreter that has aiconfigurator 0.12")
    parser.add_argument(
        "--aiconfigurator-rows", type=int, default=0, help="that it is asked at most, drawn at random; 0: all"
    )
    parser.add_argument(
        "--aiconfigurator-seconds", type=float, default=300.0, help="after which it is asked no further row"
    )
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cold:
        begun = time.perf_counter()
        print(json.dumps({"plans": _plans(), "seconds": time.perf_counter() - begun}))
        return 0
    folder = arguments.data / "engine_measurements"
    if tables_folder() is None or not folder.is_dir():
        missing = "the extra nvidia-tables" if tables_folder() is None else f"measured rows at {folder}"
        print(f"bench-costmodel needs {missing}", file=sys.stderr)
        print(json.dumps({"bench": "costmodel", "skipped": missing}))
        return 0
    line: dict[str, Any] = {"bench": "costmodel"}
    try:
        _fill(line, folder, arguments)
    except KeyboardInterrupt:
        print(json.dumps(line | {"interrupted": True}))
        return 130
    print(json.dumps(line))
    return 0


def _fill(line: dict[str, Any], folder: Path, arguments: argparse.Namespace) -> None:
    """Everything in turn, each part's figures in the line as soon as they are there."""
    rows = read_rows(folder / "aiconfigurator_silicon_sample.csv.gz")
    line["rows"] = len(rows)
    begun = time.perf_counter()
    predicted = predict_rows(rows)
    print(f"{len(rows)} rows predicted in {time.perf_counter() - begun:.1f} s, tables loaded on the way", flush=True)
    answered = predicted["refused"] == ""
    plain = validate(rows, predicted)
    line["zero_shot"] = _line(plain)
    _show("zero-shot", plain)
    good, priced = rows[answered], predicted[answered]
    begun = time.perf_counter()
    made = {target: leave_one_out(good, priced, target) for target in TARGETS}
    fitted = validate(rows, predicted, made)
    line["calibrated"] = _line(fitted) | {"fits_s": round(time.perf_counter() - begun, 1)}
    _show("calibrated on other architectures", fitted)
    for name in plain.broken:
        print(f"off by more than a factor of 5, measured or read wrongly (counted all the same): {name}")
    print("pipeline and decode context parallelism: no measured rows, unvalidated", flush=True)
    line["mlperf"] = _mlperf(folder / "mlperf_inference_v4.1_llm.csv")
    line |= _speed()
    answers = arguments.aiconfigurator or _ask_aiconfigurator(arguments, rows, predicted)
    line["aiconfigurator"], line["both_answered"] = _aiconfigurator(answers, good, made)
    line |= _paired_sweeps(arguments.aiconfigurator_python)


def _show(title: str, found: Validation) -> None:
    print(f"\n{title}: {found.answered:.1%} of {found.rows} rows answered; refused: {found.refused}")
    print(f"{'p50':>8} {'p90':>8} {'p99':>8} {'rank':>6} {'in 90 %':>8} {'rows':>6}")
    rows = [*found.scores.items(), *((f"{t}, deployment fully told", s) for t, s in found.told.items())]
    for name, score in rows:
        print(
            f"{score.p50:8.1%} {score.p90:8.1%} {score.p99:8.1%} {score.spearman:6.2f} {score.coverage90:8.1%} {score.rows:6d}  {name}"
        )
    print(f"regret: {asdict(found.regret)}")
    print(f"regret, aggregated rows: {asdict(found.regret_aggregated)}")


def _line(found: Validation) -> dict[str, Any]:
    made: dict[str, Any] = {"answered": round(found.answered, 4)}
    for target in TARGETS:
        score, told = found.scores[target], found.told[target]
        made |= {
            f"{target}_median_error": round(score.p50, 4), f"{target}_spearman": round(score.spearman, 4),
            f"{target}_coverage90": round(score.coverage90, 4), f"{target}_median_error_told": round(told.p50, 4),
        }  # fmt: skip
    regret = found.regret
    return made | {
        "kept_within_5_percent": round(regret.kept_within_5_percent, 3),
        "kept_within_5_percent_aggregated": round(found.regret_aggregated.kept_within_5_percent, 3),
        "covered_within_5_percent": round(regret.covered_within_5_percent, 3),
        "in_turn_within_5_percent": round(regret.in_turn_within_5_percent, 3),
        "in_turn_within_5_percent_aggregated": round(found.regret_aggregated.in_turn_within_5_percent, 3),
        "top1_regret_median": round(regret.top1_median, 4),
    }


def _ask_aiconfigurator(arguments: argparse.Namespace, rows: pd.DataFrame, predicted: pd.DataFrame) -> Path | None:
    """Its answers, by an interpreter that has it; nothing where there is none, which is said."""
    interpreter, seconds = arguments.aiconfigurator_python, arguments.aiconfigurator_seconds
    if interpreter is None:
        print("aiconfigurator: not asked (--aiconfigurator-python gives an interpreter that has it)")
        return None
    folder = Path(tempfile.mkdtemp())
    told = completed(rows)
    drafts = told["drafts"].fillna(0.0).astype(int)
    told = told.assign(accepted=np.array(ACCEPTED)[drafts], clients=predicted["clients"])
    told.to_csv(folder / "rows.csv", index=False)
    out = folder / "answers.csv"
    asked = (
        str(folder / "rows.csv"),
        str(out),
        "--rows",
        str(arguments.aiconfigurator_rows),
        "--seconds",
        str(seconds),
    )
    line = _told(interpreter, *asked, timeout_seconds=seconds + 120.0)
    print(f"aiconfigurator: {line}", flush=True)
    # Its file grows row by row: a process that did not end in time has answered all the same.
    return out if out.is_file() else None


def _told(interpreter: Path, *arguments: str, timeout_seconds: float = 600.0) -> dict[str, Any] | None:
    """The last line of the script that asks it; None when it fails, which is said. Its progress goes to standard error."""
    script = Path(__file__).with_name("aiconfigurator_answers.py")
    try:
        done = subprocess.run(
            [str(interpreter), str(script), *arguments], env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE,
            text=True, timeout=timeout_seconds,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"aiconfigurator: could not be asked: {error}")
        return None
    if done.returncode != 0:
        print(f"aiconfigurator: could not be asked: exit code {done.returncode}")
        return None
    line: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def _paired_sweeps(interpreter: Path | None, turns: int = 3) -> dict[str, Any]:
    """Its default sweep and our plans in turns: seconds as processes, and points a second once loaded, as ratios of medians."""
    if interpreter is None:
        return {}
    ours, theirs, cold = [], [], []
    for _ in range(turns):
        begun = time.perf_counter()
        made = subprocess.run(
            [sys.executable, "-m", "benchmarks.bench_costmodel", "--cold"], check=True, capture_output=True, text=True
        )
        cold.append(time.perf_counter() - begun)
        said = json.loads(made.stdout)
        ours.append(said["plans"] / said["seconds"])
        swept = _told(interpreter, "--sweep")
        if swept is None or not swept["sweep_seconds"] or not swept["found"]:
            print(f"aiconfigurator: its sweep gave nothing to compare with: {swept}")
            return {}
        theirs.append((swept["sweep_seconds"], swept["points"]))
    seconds = float(np.median([one for one, _ in theirs]))
    rates = [points / one for one, points in theirs if points]
    rate = float(np.median(rates)) if rates else None
    print(f"in turns: sweeps of {theirs} (seconds, points), our processes {[round(one, 2) for one in cold]} s")
    return {
        "aiconfigurator_sweep_s": seconds, "sweep_ratio": round(seconds / float(np.median(cold)), 1),
        "plans_per_s_ratio": round(float(np.median(ours)) / rate, 1) if rate else None,
    }  # fmt: skip


def _aiconfigurator(path: Path | None, rows: pd.DataFrame, made: dict[str, pd.DataFrame]) -> tuple[Any, Any]:
    """Its error on the rows it answers, and both on the rows that both answer; None without a file of answers."""
    if path is None:
        return None, None
    asked = pd.read_csv(path).set_index("id")
    answers = asked.dropna()
    shared = rows[rows["id"].isin(answers.index)]
    if not len(shared):
        return None, None
    theirs = answers.loc[shared["id"]].set_index(shared.index)
    beside: dict[str, Any] = {"rows": len(shared), "asked": len(asked)}
    both: dict[str, Any] = {"rows": len(shared)}
    for target in TARGETS:
        measured = shared[f"silicon_{target}_ms"]
        beside[f"{target}_median_error"] = round(float((theirs[f"{target}_ms"] / measured - 1).abs().median()), 4)
        both[f"{target}_median_error"] = round(
            float((made[target].loc[shared.index, "value"] / measured - 1).abs().median()), 4
        )
    return beside, both


def _mlperf(path: Path) -> dict[str, Any]:
    """Predicted over measured output tokens/s of whole systems, medians by accelerator."""
    rows = pd.read_csv(path)
    graph = graph_of(LLAMA2_70B, "Llama-2-70B")
    found: dict[str, Any] = {}
    for accelerator, name in ACCELERATORS.items():
        part = rows[
            (rows["accelerator"] == accelerator) & rows["model"].str.startswith("llama2-70b") & (rows["scenario"] == "Offline")
            & (rows["accel_per_node"] == 8) & (rows["nodes"] == 1)
        ]  # fmt: skip
        if not len(part):
            continue
        asked = Asked(backend="trtllm", precision="fp8", kv_bytes=1.0, simulate=False, disaggregated=False)
        best = plan(graph, parse_machine(f"{name}x8"), OPEN_ORCA, asked).plans[0]
        predicted = best.tokens_per_s_per_gpu.value * 8
        ratio = predicted / float(part["tokens_per_s"].median())
        print(
            f"MLPerf v4.1 Llama-2-70B Offline, {name} x 8: predicted {predicted:.0f}, measured {part['tokens_per_s'].median():.0f} ({len(part)} systems)"
        )
        found[name] = {"ratio": round(ratio, 3), "systems": len(part)}
    return found


def _plans(simulate: bool = False) -> int:
    model, hardware, load = SPEED_CASE
    asked = Asked(backend="trtllm", simulate=simulate)
    return plan(load_graph(model), parse_machine(hardware), load, asked).considered


def _speed() -> dict[str, Any]:
    """Warm median of five, and the wall time of a fresh process."""
    _plans()
    warm = []
    for _ in range(5):
        begun = time.perf_counter()
        count = _plans()
        warm.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "benchmarks.bench_costmodel", "--cold"], check=True, capture_output=True)
    cold = time.perf_counter() - begun
    begun = time.perf_counter()
    _plans(simulate=True)
    simulated = time.perf_counter() - begun
    seconds = float(np.median(warm))
    print(
        f"{count} plans: {seconds:.2f} s warm, {cold:.2f} s as a cold process, {simulated:.2f} s with the best 50 simulated"
    )
    return {
        "plans": count,
        "plans_per_s": round(count / seconds),
        "warm_s": round(seconds, 3),
        "cold_process_s": round(cold, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
