"""Times the kernels that the cost model adds up, on this machine: `hotpass microbench`.

Runs as a process of its own (`python -m engines.microbench`), with the thread environment that engines have; the rows go to one
Parquet file with the machine's fingerprint. Matrix products and experts rotate through copies of their weights, so that what a model
streams from memory is streamed here too. Sums over ranks are timed in `engines.microbench_ranks`. Not timed: quantised kernels, sparse attention.

`context` and `decode` time torch's scaled dot-product attention in fp32, `decode` with what transformers' cache does before it: it
grows by copying all of itself. `experts` are those of transformers' own module. `stream` is an addition that reads and writes n bytes in all.
`layer` and `step` are what the host takes for one layer and for the rest of a step: models of transformers so narrow that their
kernels cost next to nothing, of two depths.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from engines.microbench_ranks import rank_counts, reductions
from engines.probe_host import read_host
from engines.threading_env import environment_record, process_environment, usable_cores
from hotpass.errors import InputError, MachineError
from hotpass.records.deployment import HardwareRef

SCHEMA_VERSION = "1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = ((576, 576), (1536, 576), (3072, 576), (576, 1536), (4096, 1024), (4096, 4096), (49152, 576))
"""(n, k): widths of small decoders, and two beyond them."""
TOKENS = (1, 4, 16, 64, 256)
HEADS = ((9, 3, 64), (16, 4, 64), (32, 8, 128))
"""(query heads, key-value heads, width)."""
EXPERTS = ((576, 256, 2, 8), (1024, 512, 4, 32))
"""(hidden, width, top-k, experts)."""
EXPERT_TOKENS = (1, 8, 64, 512)
HOST_DEPTHS = (2, 10)
HOST_SHARE = 0.05
"""Of the time, for what the host takes."""
RANKS_SHARE = 0.05
"""Of the time, for sums over ranks: processes of one thread each, as many as there are cores."""
MIB = 1 << 20
MOST_COPIES_BYTES = 512 * MIB

Row = dict[str, Any]
Work = Callable[[int], object]
"""Runs once; the argument counts up, so that inputs can rotate."""


def microbench(out: Path, *, threads: int | None = None, seconds: float = 120.0) -> Path:
    """Time everything in a process of its own and write `out`. Raises InputError and MachineError."""
    if seconds < 5 or seconds > 600:
        raise InputError("--seconds", seconds, "is not between 5 and 600", "120 is enough")
    if out.suffix != ".parquet":
        raise InputError("--out", out, "is no .parquet file", "name it so")
    count = threads or usable_cores()
    command = [sys.executable, "-m", "engines.microbench", str(out), "--threads", str(count), "--seconds", str(seconds)]
    limit = 3 * seconds + 240
    try:
        done = subprocess.run(
            command, env=process_environment(count), capture_output=True, text=True, timeout=limit
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MachineError(f"the microbenchmark did not end within {limit:.0f} s: run it on an idle machine") from None
    if done.returncode != 0:
        raise MachineError(f"the microbenchmark failed: {done.stderr.strip()[-500:]}")
    return out


def rows_of(seconds: float, llc_bytes: int) -> Iterator[Row]:
    """All shapes, each within its part of the time."""
    shapes = [*_products(llc_bytes), *_attention(llc_bytes), *_experts(llc_bytes), *_streams()]
    yield from _host(HOST_SHARE * seconds)
    each = (1 - HOST_SHARE) * seconds / len(shapes)
    for facts, make in shapes:
        work = make()
        yield {**facts, "seconds": timed(work, each)}
        del work


def timed(work: Work, budget_seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median of at least three runs after one that warms, and of as many as the budget holds."""
    begun = clock()
    work(0)
    runs: list[float] = []
    while len(runs) < 3 or (clock() - begun < 0.6 * budget_seconds and len(runs) < 200):
        start = clock()
        work(len(runs) + 1)
        runs.append(clock() - start)
    runs.sort()
    return runs[len(runs) // 2]


def _copies(one_bytes: int, llc_bytes: int) -> int:
    """So many that together they are three times the last-level cache, within memory."""
    return max(1, min(-(-3 * llc_bytes // one_bytes), MOST_COPIES_BYTES // one_bytes))


def _products(llc_bytes: int) -> Iterator[tuple[Row, Callable[[], Work]]]:
    for (name, dtype), (n, k), m in itertools.product(DTYPES.items(), PRODUCTS, TOKENS):

        def make(n: int = n, k: int = k, m: int = m, dtype: torch.dtype = dtype) -> Work:
            count = _copies(n * k * dtype.itemsize, llc_bytes)
            weights = [torch.randn(n, k).to(dtype) for _ in range(min(count, 2))]
            weights += [weights[0].clone() for _ in range(count - len(weights))]
            x = torch.randn(m, k).to(dtype)
            return lambda turn: F.linear(x, weights[turn % len(weights)])

        yield {"op": "gemm", "dtype": name, "m": m, "n": n, "k": k}, make


def _attention(llc_bytes: int) -> Iterator[tuple[Row, Callable[[], Work]]]:
    for (heads, kv_heads, width), batch, tokens in itertools.product(HEADS, (1, 8), (64, 256, 1024)):
        for op in ("context", "decode"):
            if op == "context" and batch * tokens > 2048:
                continue

            def make(
                op: str = op,
                heads: int = heads,
                kv: int = kv_heads,
                width: int = width,
                batch: int = batch,
                tokens: int = tokens,
            ) -> Work:
                q = torch.randn(batch, heads, tokens if op == "context" else 1, width)
                if op == "context":
                    k, v = (torch.randn(batch, kv, tokens, width) for _ in range(2))
                    return lambda turn: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                # As many as a model's layers would keep: by the time that one is read again, the others have passed through the cache.
                count = _copies(2 * batch * kv * (tokens - 1) * width * 4, llc_bytes)
                caches = [torch.full((2, batch, kv, tokens - 1, width), 0.5) for _ in range(count)]
                new = torch.randn(batch, kv, 1, width)

                def decode(turn: int) -> torch.Tensor:
                    k, v = (torch.cat([old, new], dim=-2) for old in caches[turn % count])
                    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

                return decode

            yield {
                "op": op, "dtype": "fp32", "batch": batch, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": width,
            }, make  # fmt: skip


def _experts(llc_bytes: int) -> Iterator[tuple[Row, Callable[[], Work]]]:
    """A layer's experts as transformers runs them unless told otherwise; layers in turn, so that their weights come from memory."""
    for (hidden, width, topk, count), tokens in itertools.product(EXPERTS, EXPERT_TOKENS):

        def make(
            hidden: int = hidden, width: int = width, topk: int = topk, count: int = count, tokens: int = tokens
        ) -> Work:
            layers = _expert_layers(hidden, width, topk, count, llc_bytes)
            x = torch.randn(tokens, hidden)
            weight, choice = torch.rand(tokens, count).topk(topk)
            return lambda turn: layers[turn % len(layers)](x, choice, weight)

        facts = {
            "op": "experts",
            "dtype": "fp32",
            "tokens": tokens,
            "n": hidden,
            "k": width,
            "topk": topk,
            "num_experts": count,
        }
        yield facts, make


@functools.lru_cache(maxsize=1)
def _expert_layers(hidden: int, width: int, topk: int, count: int, llc_bytes: int) -> list[torch.nn.Module]:
    """Kept for the next number of tokens: random weights take longer to make than to multiply."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=width, num_experts=count, num_experts_per_tok=topk, intermediate_size=16,
        num_hidden_layers=_copies(count * 3 * hidden * width * 4, llc_bytes), num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, vocab_size=64, mlp_only_layers=[],
    )  # fmt: skip
    return [layer.mlp.experts for layer in AutoModelForCausalLM.from_config(config).eval().model.layers]


def _streams() -> Iterator[tuple[Row, Callable[[], Work]]]:
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28):

        def make(size: int = size) -> Work:
            a, b = torch.randn(size // 8), torch.empty(size // 8)
            return lambda turn: torch.add(a, 1.0, out=b)

        yield {"op": "stream", "dtype": "fp32", "n": size}, make


def _host(seconds: float) -> Iterator[Row]:
    """One decode step of two narrow models that differ in depth alone; the clock of both stands for any width."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    models = []
    for depth in HOST_DEPTHS:
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=depth, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=64, max_position_embeddings=4096,
        )  # fmt: skip
        models.append(LlamaForCausalLM(config).eval())
    token = torch.zeros(1, 1, dtype=torch.long)
    runs: list[list[float]] = [[], []]
    begun = time.perf_counter()
    # In turns, so that both depths see the same machine; the first of each warms.
    while len(runs[1]) < 4 or (time.perf_counter() - begun < seconds and len(runs[1]) < 200):
        for model, found in zip(models, runs, strict=True):
            start = time.perf_counter()
            model(token, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
            found.append(time.perf_counter() - start)
    shallow, deep = (sorted(found[1:])[(len(found) - 1) // 2] for found in runs)
    layer = (deep - shallow) / (HOST_DEPTHS[1] - HOST_DEPTHS[0])
    for op, value in (("layer", layer), ("step", shallow - HOST_DEPTHS[0] * layer)):
        yield {"op": op, "dtype": "fp32", "seconds": max(value, 1e-6)}


def write(rows: list[Row], path: Path, *, threads: int) -> None:
    """One Parquet file; the machine and the versions are its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    host = read_host()
    ref = HardwareRef(
        name=f"cpu:{host.model}", device="cpu", num_devices=host.cores, isa=host.isa,
        last_level_cache_bytes=host.last_level_cache_bytes, memory_bytes=host.memory_bytes,
    )  # fmt: skip
    environment = environment_record(ref.id, threads)
    facts = {
        "schema_version": SCHEMA_VERSION, "name": ref.name, "hardware_id": ref.id, "memory_bytes": ref.memory_bytes, "threads": threads,
        "versions": dict(environment.versions), "fingerprint": environment.fingerprint,
    }  # fmt: skip
    numbers = ("m", "n", "k", "batch", "tokens", "heads", "kv_heads", "head_dim", "topk", "num_experts")
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in ("op", "dtype", "seconds")}
    columns |= {name: [int(row.get(name, 0)) for row in rows] for name in numbers}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata({"hotpass": json.dumps(facts)}), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.inference_mode():
        rows = list(rows_of((1 - RANKS_SHARE) * given.seconds, read_host().last_level_cache_bytes))
    counts = rank_counts(given.threads)
    for ranks in counts:
        rows += reductions(ranks, RANKS_SHARE * given.seconds / len(counts))
    write(rows, given.out, threads=given.threads)


if __name__ == "__main__":
    main()
