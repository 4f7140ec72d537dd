"""One cold vLLM: start, put a part in, time the rows, end. Runs in vLLM's own environment: `python -m … REQUEST`.

The way of most tools today: whole calls of `LLM.generate`, timed by the wall clock. Decoding speed is the difference between a long and
a one-token generation after the same prompts. Numerics are not judged, which favours this arm.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import load_file
from vllm import LLM, SamplingParams

from engines.program import Artefacts
from engines.vllm.extension import ARTEFACTS

STEPS = 24
REPEATS = 3


def main() -> None:
    orders: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    start = time.perf_counter()
    llm = LLM(
        model=orders["model"],
        dtype=orders["dtype"],
        max_model_len=orders["max_model_len"],
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 29,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        worker_extension_cls="engines.vllm.extension.HotpassExtension",
    )
    loaded = time.perf_counter()
    _install(llm, orders)
    rows = orders["rows"]
    times = {row["name"]: [_step_seconds(llm, row, repeat) for repeat in range(REPEATS + 1)][1:] for row in rows}
    counts = llm.collective_rpc("hotpass_counts", args=("candidate",))[0]
    if orders["candidate"] is not None and not all(counts.values()):
        raise RuntimeError("the part never ran")
    step = sum(row["share"] * median(times[row["name"]]) for row in rows)
    ended = time.perf_counter()
    answer = {"log_step": math.log(step), "load_seconds": loaded - start, "measure_seconds": ended - loaded}
    Path(orders["answer"]).write_text(json.dumps(answer))


def _install(llm: Any, orders: dict[str, Any]) -> None:
    llm.collective_rpc("hotpass_begin", args=("cold", 0))
    plain = orders["candidate"]
    if plain is None:
        return
    derived = tuple({slot: load_file(path) for slot, path in made.items()} for made in orders["derived"])
    ARTEFACTS[plain["id"]] = Artefacts(native=tuple(orders["native"]), derived=derived)
    order = {
        "side": "candidate",
        "candidate": plain,
        "candidate_id": plain["id"],
        "sources": orders["sources"],
    }
    reply = llm.collective_rpc("hotpass_install", args=(order,))[0]
    if "failure" in reply:
        raise RuntimeError(reply["failure"]["message"])
    llm.collective_rpc("hotpass_activate", args=("candidate",))


def _step_seconds(llm: Any, row: dict[str, Any], repeat: int) -> float:
    draw = random.Random(f"{row['name']}/{repeat}")
    length = row["context"] or row["query_tokens"]
    prompts = [[draw.randrange(10, row["vocab"]) for _ in range(length)] for _ in range(row["num_seqs"])]
    if row["phase"] != "decode":
        return _timed(llm, prompts, 1)
    return max(1e-6, _timed(llm, prompts, 1 + STEPS) - _timed(llm, prompts, 1)) / STEPS


def _timed(llm: Any, prompts: list[list[int]], new_tokens: int) -> float:
    wanted = SamplingParams(
        max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, temperature=0, detokenize=False
    )
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": item} for item in prompts], wanted, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
