"""Two versions of a whole-model C++ part, step by step in turns: what a change of the part is worth, by rows of a shape table.

    python -m benchmarks.bench_cpp_model [--a weights_as=gguf] [--b weights_as=fp32] [--a-folder DIR] [--b-folder DIR]
        [--model smollm2-135m] [--row decode:1:531 --row prefill:405:874] [--pairs 15] [--threads 2] [--clock cpu]

`a` is measured against `b`: other parameters, or another folder with the part (an older commit's). Both are in this process, each with
its own KV pool, and take turns in ABBA order; a turn is some steps of one row with random contexts. Without `--row`, the rows are those of
the chat preset, with their share of the whole time. Prints ms (median, and first and third quartile), the ratio b / a by its pairs, GB/s of
what a must read, and the largest difference of the logits; one JSON line last. Between turns another buffer is read, as
large as a float32 model, so that no side finds its weights in a cache that the other would have emptied.

What is not here: the engine, its judge, and any claim; `hotpass try` makes those.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cpp_side import CppSide
from cluster.floors import kv_bytes, stored_bytes
from engines.decoder.batch import build_batch
from engines.prepare import prepare_model
from hotpass.records.deployment import ModelRef
from hotpass.records.shapes import Phase, ShapeRow
from hotpass.settings import check_setting
from hotpass.traffic import read_traffic
from hotpass.traffic.shapes import shape_table

STEPS = {Phase.DECODE: 8, Phase.PREFILL: 1, Phase.MIXED: 1}
"""Of one turn."""
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu`: processor time of all threads; with one thread it tells of computing, not of waiting, on a machine that others use too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One row."""

    row: ShapeRow
    a_ms: list[float]
    """Of a step, one a pair of turns."""
    b_ms: list[float]
    max_abs: float
    """Largest difference between the logits of the two."""


def compare(
    a: CppSide, b: CppSide, row: ShapeRow, pairs: int, vocab: int, between: Callable[[], object], clock: Clock
) -> Compared:
    """ABBA turns with the same tokens."""
    generator = torch.Generator().manual_seed(1)
    a_ms, b_ms, worst = [], [], 0.0
    for side in (a, b):
        _fill(side, row)
    for pair in range(pairs + 1):
        tokens = torch.randint(0, vocab, (STEPS[row.phase], row.query_tokens), generator=generator)
        seconds: dict[int, float] = {}
        logits = []
        for side in (a, b) if pair % 2 else (b, a):
            between()
            seconds[id(side)], found = _turn(side, row, tokens, clock)
            logits.append(found)
        worst = max(worst, float((logits[0] - logits[1]).abs().max()))
        if pair:  # the first is a warm-up
            a_ms.append(seconds[id(a)] * 1e3)
            b_ms.append(seconds[id(b)] * 1e3)
    return Compared(row=row, a_ms=a_ms, b_ms=b_ms, max_abs=worst)


def _fill(side: CppSide, row: ShapeRow) -> None:
    """Random contexts, the same on every side."""
    generator = torch.Generator().manual_seed(row.context_mean)
    _, kv_heads, _, head_dim = side.kv.keys(0).shape
    for slot in range(row.num_seqs):
        side.kv.write(
            slot, torch.randn(side.kv.num_layers, 2, kv_heads, row.context_mean, head_dim, generator=generator)
        )


def _turn(side: CppSide, row: ShapeRow, tokens: torch.Tensor, clock: Clock) -> tuple[float, torch.Tensor]:
    """Seconds of a step, and the last logits."""
    decode = row.phase is Phase.DECODE
    each = [row.query_tokens // row.num_seqs] * row.num_seqs
    batches = [
        build_batch(
            tokens[step],
            contexts=[row.context_mean + step * decode] * row.num_seqs,
            query_lens=each,
            slots=list(range(row.num_seqs)),
        )
        for step in range(len(tokens))
    ]
    start = clock()
    for batch in batches:
        logits = side.step(batch)
    return (clock() - start) / len(batches), logits


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def parse_row(text: str) -> ShapeRow:
    """`decode:SEQUENCES:CONTEXT` or `prefill:TOKENS:CONTEXT`."""
    phase, count, context = text.split(":")
    decode = phase == "decode"
    return ShapeRow(
        phase=Phase(phase), num_seqs=int(count) if decode else 1, query_tokens=int(count), context_mean=int(context),
        context_max=int(context), steps_share=0.0, tokens_share=0.0,
    )  # fmt: skip


def main() -> None:
    options = _arguments()
    model = prepare_model(options.model)
    threads = int(str(check_setting("threads", options.threads)))
    rows = tuple(parse_row(text) for text in options.row)
    if not rows:
        rows = shape_table(read_traffic("chat", max_context=model.max_context), 1, max_rows=4).rows
    slots = max(row.num_seqs for row in rows)
    positions = max(row.context_max + row.query_tokens // row.num_seqs + max(STEPS.values()) for row in rows)
    torch.set_num_threads(1)
    a, b = (
        CppSide(model, _params(text), folder=folder, slots=slots, positions=positions, threads=threads)
        for folder, text in ((options.a_folder, options.a), (options.b_folder, options.b))
    )
    other = torch.zeros(options.between_mib << 18)
    clock = CLOCKS[options.clock]
    found = []
    with torch.inference_mode():
        for row in rows:
            found.append(compare(a, b, row, options.pairs, model.vocab_size, other.sum, clock))
            _say(_line(found[-1], model))
    for side in (a, b):
        side.close()
    print(
        json.dumps(
            {
                "bench": "cpp-model",
                "model": options.model,
                "threads": threads,
                "clock": options.clock,
                "rows": _summary(found),
            }
        )
    )


def _line(found: Compared, model: ModelRef) -> str:
    (_, a, _), (_, b, _) = quartiles(found.a_ms), quartiles(found.b_ms)
    low, ratio, high = quartiles([b / a for a, b in zip(found.a_ms, found.b_ms, strict=True)])
    rate = (stored_bytes(model) + kv_bytes(model, found.row)) / a / 1e6
    return (
        f"{found.row.key:<26} a {a:8.3f} ms   b {b:8.3f} ms   b / a {ratio:.3f} [{low:.3f}, {high:.3f}]   {rate:5.1f} GB/s   "
        f"logits differ by {found.max_abs:.2g}"
    )


def _summary(found: Sequence[Compared]) -> list[dict[str, Any]]:
    total = sum(item.row.steps_share * statistics.median(item.a_ms) for item in found)
    return [
        {
            "row": item.row.key, "steps_share": item.row.steps_share, "a_ms": quartiles(item.a_ms), "b_ms": quartiles(item.b_ms),
            "b_over_a": quartiles([b / a for a, b in zip(item.a_ms, item.b_ms, strict=True)]), "max_abs": item.max_abs,
            "time_share": item.row.steps_share * statistics.median(item.a_ms) / total if total else None,
        }
        for item in found
    ]  # fmt: skip


def _params(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split(",") if item)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    for side in "ab":
        parser.add_argument(f"--{side}", default="weights_as=gguf", help="parameters, as name=value,name=value")
        parser.add_argument(f"--{side}-folder", default="", help="a folder with the part; the catalogue's without it")
    parser.add_argument("--row", action="append", default=[], help="decode:SEQUENCES:CONTEXT or prefill:TOKENS:CONTEXT")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--between-mib", type=int, default=540, help="read between two turns")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"bench-cpp-model · {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
