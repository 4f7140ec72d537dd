"""aiconfigurator's answers to the rows of the public sample, and the time of its sweep: run by an interpreter that has it.

    PYTHON_WITH_AICONFIGURATOR benchmarks/aiconfigurator_answers.py ROWS.csv OUT.csv [--rows 0] [--seconds 300]
    PYTHON_WITH_AICONFIGURATOR benchmarks/aiconfigurator_answers.py --sweep

It needs aiconfigurator 0.12 and pandas, and nothing of hotpass. Each row is asked through its own public entry point, with what the row
says (`drafts` and the tokens that a step then yields, `accepted`, and `clients` among it); a row that it refuses has no answer. One process
asks all rows, in an order drawn at random, until `--seconds` are over: what was answered by then is a fair sample. A process loads each
database once; which one is the latest is kept too, since working that out reads every database's description, two or three times a row,
and takes most of a row's time otherwise. `OUT.csv`: `id`, `tpot_ms`, `ttft_ms`, written row by row. A JSON line last, also after
Ctrl-C: rows given, asked and answered, why it refused, and seconds; of `--sweep`, in which nothing is kept for it, the seconds of its
default sweep for one model on 72 accelerators, the points that it priced (null where it does not say) and what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib
import io
import json
import logging
import math
import sys
import time
import warnings
from collections import Counter
from typing import Any

import pandas as pd

API = "aiconfigurator.cli.api"
DATABASES = "aiconfigurator_core.sdk.perf_database"
LOOKED_UP = ("get_supported_databases", "get_latest_database_version")
"""What is asked again for every row, of files that do not change."""
NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "zhipuai/GLM-5": "zai-org/GLM-5-FP8",
}
"""Names of the sample that its own bundled configurations spell otherwise."""
WIDTHS = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
PROGRESS_SECONDS = 15.0
SWEEP = ("deepseek-ai/DeepSeek-V3", "gb200", 72)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--rows", type=int, default=0, help="at most so many, drawn at random; 0: all")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no further row is asked")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if given.sweep:
        print(json.dumps(_sweep()))
        return
    rows = pd.read_csv(given.source).sample(frac=1.0, random_state=0)
    rows = rows.iloc[: given.rows or None]
    print(json.dumps(_asked(rows, given.out, given.seconds)))


def _asked(rows: pd.DataFrame, out: str, seconds: float) -> dict[str, Any]:
    """Asks row by row until there is none left, the time is over, or somebody interrupts."""
    _keep_lookups()
    begun = said = time.perf_counter()
    asked = answered = 0
    refused: Counter[str] = Counter()
    with open(out, "w", encoding="utf-8", newline="") as file, contextlib.suppress(KeyboardInterrupt):
        writer = csv.writer(file)
        writer.writerow(["id", "tpot_ms", "ttft_ms"])
        for _, row in rows.iterrows():
            now = time.perf_counter()
            if now - begun > seconds:
                break
            if now - said > PROGRESS_SECONDS:
                said = now
                print(
                    f"aiconfigurator: {asked} of {len(rows)} rows in {now - begun:.0f} s", file=sys.stderr, flush=True
                )
            try:
                tpot, ttft = _answer(row)
                answered += 1
            except (Exception, SystemExit) as error:
                tpot = ttft = math.nan
                refused[type(error).__name__] += 1
            writer.writerow([row["id"], tpot, ttft])
            file.flush()
            asked += 1
    spent = round(time.perf_counter() - begun, 1)
    return {"given": len(rows), "asked": asked, "answered": answered, "refused": dict(refused), "seconds": spent}


def _keep_lookups() -> None:
    """Before its entry point is loaded, so that all of it sees what is kept."""
    module = importlib.import_module(DATABASES)
    for name in LOOKED_UP:
        setattr(module, name, functools.cache(getattr(module, name)))


def _answer(row: pd.Series) -> tuple[float, float]:
    """TPOT and TTFT in ms. Raises whatever it refuses a row with, and ValueError where a time is not positive."""
    estimate = importlib.import_module(API).cli_estimate
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = estimate(
            NAMES.get(row["model_path"], row["model_path"]), row["system"], mode=row["mode"], backend_name=row["backend"],
            isl=int(row["isl"]), osl=int(row["osl"]), **_said(row),
        )  # fmt: skip
    tpot, ttft = float(found.tpot), float(found.ttft)
    if not (tpot > 0 and ttft > 0):
        raise ValueError("no positive time")
    return tpot, ttft


def _said(row: pd.Series) -> dict[str, Any]:
    """The row's own columns as arguments; what it leaves open stays the default."""
    apart = row["mode"] == "disagg"
    sides = ("prefill_", "decode_") if apart else ("",)
    names = [f"{side}{name}" for side in sides for name in (*WIDTHS, "batch_size")]
    names += ["prefill_num_workers", "decode_num_workers"] if apart else []
    given: dict[str, Any] = {name: int(row[name]) for name in names if not pd.isna(row.get(name)) and row[name]}
    if apart:
        # Rows completed from published deployments have no batches: a prompt at a time, and the clients of one decode group.
        groups = float(given.get("decode_num_workers", 1)) * float(given.get("decode_attention_dp_size", 1))
        given.setdefault("prefill_batch_size", 1)
        if not pd.isna(row.get("clients")):
            given.setdefault("decode_batch_size", max(1, math.ceil(row["clients"] / groups)))
    if row["model_path"].startswith("openai/gpt-oss"):
        formats: tuple[str, ...] = ()  # shipped in MXFP4; the rows' columns say otherwise
    else:
        formats = ("gemm_quant_mode", "moe_quant_mode")
    for name in formats:
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
        return {"sweep_seconds": None, "points": None, "found": 0}
    seconds = round(time.perf_counter() - begun, 1)
    frames = [frame for each in found.raw_results.values() for frame in each.values() if frame is not None]
    # Release 0.12 does not hand back what it priced, only what it found.
    best = sum(len(frame) for frame in found.best_configs.values() if frame is not None)
    return {"sweep_seconds": seconds, "points": sum(map(len, frames)) or None, "found": best}


if __name__ == "__main__":
    main()
