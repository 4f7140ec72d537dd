"""aiconfigurator's answers to the rows of the public sample, and the time of its sweep: run by an interpreter that has it.

    PYTHON_WITH_AICONFIGURATOR benchmarks/aiconfigurator_answers.py ROWS.csv OUT.csv [--rows 0]
    PYTHON_WITH_AICONFIGURATOR benchmarks/aiconfigurator_answers.py --sweep

It needs aiconfigurator 0.12 and pandas, and nothing of hotpass. Each row is asked through its own public entry point, with what the row
says (`drafts` and the tokens that a step then yields, `accepted`, among it) and nothing else; a row that it refuses has no answer.
`OUT.csv`: `id`, `tpot_ms`, `ttft_ms`. A JSON line last: rows asked and answered, and seconds; of `--sweep` the seconds of its default
sweep for one model on 72 accelerators, and the points that it priced.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import math
import time
import warnings

import pandas as pd

API = "aiconfigurator.cli.api"
NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
}
"""Names of the sample that its own bundled configurations spell otherwise."""
WIDTHS = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
SWEEP = ("deepseek-ai/DeepSeek-V3", "gb200", 72)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--rows", type=int, default=0, help="so many, drawn evenly; 0: all")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if given.sweep:
        print(json.dumps(_sweep()))
        return
    rows = pd.read_csv(given.source)
    if given.rows:
        rows = rows.iloc[:: max(1, len(rows) // given.rows)]
    begun = time.perf_counter()
    made = [{"id": row["id"], **_answer(row)} for _, row in rows.iterrows()]
    seconds = time.perf_counter() - begun
    answers = pd.DataFrame(made, columns=["id", "tpot_ms", "ttft_ms"])
    answers.to_csv(given.out, index=False)
    line = {"asked": len(rows), "answered": int(answers["tpot_ms"].notna().sum()), "seconds": round(seconds, 1)}
    print(json.dumps(line))


def _answer(row: pd.Series) -> dict[str, float]:
    """TPOT and TTFT in ms; nan where it refuses, for whatever reason."""
    estimate = importlib.import_module(API).cli_estimate
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = estimate(
                NAMES.get(row["model_path"], row["model_path"]), row["system"], mode=row["mode"], backend_name=row["backend"],
                isl=int(row["isl"]), osl=int(row["osl"]), **_said(row),
            )  # fmt: skip
        tpot, ttft = float(found.tpot), float(found.ttft)
    except (Exception, SystemExit):
        return {"tpot_ms": math.nan, "ttft_ms": math.nan}
    sound = tpot > 0 and ttft > 0
    return {"tpot_ms": tpot if sound else math.nan, "ttft_ms": ttft if sound else math.nan}


def _said(row: pd.Series) -> dict[str, object]:
    """The row's own columns as arguments; what it leaves open stays the default."""
    apart = row["mode"] == "disagg"
    sides = ("prefill_", "decode_") if apart else ("",)
    names = [f"{side}{name}" for side in sides for name in (*WIDTHS, "batch_size")]
    names += ["prefill_num_workers", "decode_num_workers"] if apart else []
    given: dict[str, object] = {name: int(row[name]) for name in names if not pd.isna(row.get(name)) and row[name]}
    for name in ("gemm_quant_mode", "moe_quant_mode"):
        if not pd.isna(row.get(name)):
            given[name] = str(row[name])
    if not pd.isna(row.get("drafts")) and row["drafts"]:
        given |= {"nextn": int(row["drafts"]), "nextn_accepted": float(row["accepted"]) - 1.0}
    return given


def _sweep() -> dict[str, float | int | None]:
    """Seconds and points of its default sweep; null when it fails."""
    model, system, gpus = SWEEP
    begun = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = importlib.import_module(API).cli_default(
                model_path=model, total_gpus=gpus, system=system, backend="trtllm", isl=1024, osl=1024, ttft=1e4, tpot=100.0
            )  # fmt: skip
    except (Exception, SystemExit):
        return {"sweep_seconds": None, "points": None}
    seconds = round(time.perf_counter() - begun, 1)
    frames = [frame for each in found.raw_results.values() for frame in each.values() if frame is not None]
    return {"sweep_seconds": seconds, "points": sum(map(len, frames))}


if __name__ == "__main__":
    main()
