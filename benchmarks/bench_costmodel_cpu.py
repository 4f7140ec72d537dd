"""How well the cost model predicts this CPU, before and after it has seen twenty passes: `python -m benchmarks.bench_costmodel_cpu`.

    microbench ──► kernels.parquet ──► zero-shot ─┐
    transformers: 4 models x 24 shapes x rounds ──┼──► errors against session medians, beside a repeat against a repeat
              first 20 passes ──► fit_steps ──────┘
    a short campaign on SmolLM2 ──► candidates left out one by one ──► Kendall's tau

SmolLM2-135M and three random models (dense, routed experts, latent attention) run decode steps and prompts in transformers' own
modules, in a process with the engines' thread environment. The rounds go over all shapes in an order drawn anew; the twenty passes are
the first of the first round, and the medians that everything is held against are of the rounds after it. Nothing here was tuned on
these models; the candidates' tau is of predictions by a fit without the candidate.

Some eight minutes on an idle machine; `--rounds 3 --microbench-seconds 20 --campaign-seconds 0` is a try. One JSON line last, after
Ctrl-C with what was measured by then.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cluster.folder import all_candidates
from cluster.journal import read_state
from cluster.predicting import pairs_of
from costmodel.effects import fit_effects
from costmodel.graph import ModelGraph, graph_of
from costmodel.operators.own import OwnTables
from costmodel.plans import with_formats
from costmodel.steps import fit_steps, parts_of_steps, uncorrected
from engines.microbench import microbench
from engines.prepare import prepare_model
from engines.threading_env import process_environment, usable_cores
from hotpass.records.candidate import AS_LOADED
from hotpass.stats import kendall_tau

SMOLLM2 = "smollm2-135m"
PASSES = 20
"""Measured before the second prediction."""
COMMON: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1536,
    "vocab_size": 16384, "max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
RANDOM: dict[str, dict[str, Any]] = {
    "dense": {**COMMON, "model_type": "llama", "head_dim": 64},
    "moe": {
        **COMMON, "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 384, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mla": {
        **COMMON, "model_type": "deepseek_v3", "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "moe_intermediate_size": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
"""Name → config.json; weights are random, since a step's time does not depend on their values."""
SHAPES: tuple[tuple[str, int, int, int], ...] = (
    *(("decode", seqs, 1, context) for seqs in (1, 2, 4, 8) for context in (64, 256, 1024)),
    *(("prefill", 1, tokens, 0) for tokens in (16, 64, 128, 256, 512)),
    ("prefill", 1, 64, 256), ("prefill", 1, 256, 256), ("prefill", 1, 64, 1024),
    ("prefill", 2, 128, 0), ("prefill", 4, 16, 0), ("prefill", 4, 64, 0), ("prefill", 8, 16, 0),
)  # fmt: skip
"""(phase, sequences, tokens of each, cached tokens of each)."""


def main() -> int:
    given = _arguments()
    if given.worker:
        _measure(given.worker, given.rounds, given.folder, given.threads)
        return 0
    threads = given.threads or usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        kernels = given.kernels or microbench(
            Path(folder) / "kernels.parquet", threads=threads, seconds=given.microbench_seconds
        )
        spent = time.perf_counter() - begun
        source = OwnTables.read(kernels)
        _say(f"kernels of {source.machine.name} in {spent:.0f} s; host {source.host_seconds} s a layer and step")
        found: dict[str, dict[str, Any]] = {}
        candidates, interrupted = None, False
        try:
            for name in (SMOLLM2, *RANDOM):
                found[name] = _scored(name, source, given, threads, Path(folder))
            candidates = _candidates(given.campaign_seconds, Path(folder)) if given.campaign_seconds else None
        except KeyboardInterrupt:
            interrupted = True
    together = {
        name: round(float(np.median(np.concatenate([result["errors"][name] for result in found.values()]))), 4)
        for name in ("zero_shot", "after_passes", "repeat")
        if found
    }
    models = {name: {key: value for key, value in result.items() if key != "errors"} for name, result in found.items()}
    line = {
        "bench": "costmodel-cpu", "hardware": source.machine.name, "threads": threads, "microbench_s": round(spent, 1),
        "shapes": len(SHAPES), "passes": PASSES, "median_error": together, "models": models, "candidates": candidates,
    }  # fmt: skip
    print(json.dumps(line | ({"interrupted": True} if interrupted else {})))
    return 130 if interrupted else 0


def _scored(name: str, source: OwnTables, given: argparse.Namespace, threads: int, folder: Path) -> dict[str, Any]:
    """Errors of one model, relative to the medians of the rounds that were not learned from."""
    measured = _in_process(name, given.rounds, threads, folder)
    graph, width = _graph(name, measured["dtype"])
    shapes = pd.DataFrame(
        [{"phase": p, "num_seqs": n, "query_tokens": n * t, "context_mean": c, "layers": 0} for p, n, t, c in SHAPES]
    )
    parts = parts_of_steps(graph, source, shapes, kv_bytes=width, host_seconds=source.host_seconds)
    rounds = np.array(measured["ms"])
    truth = np.median(rounds[1:], axis=0)
    zero = np.abs(uncorrected(parts) / truth - 1)
    first = np.array(measured["order"][:PASSES])
    seen = shapes.loc[first].reset_index(drop=True).assign(ms=rounds[0, first], environment="here")
    seen["group"] = "transformers/" + seen["phase"]
    fit = fit_steps(parts.loc[first].reset_index(drop=True), seen)
    after = np.zeros(len(shapes))
    for phase, rows in shapes.groupby("phase"):
        spans = fit.predict(parts.loc[rows.index], rows, f"transformers/{phase}")
        after[rows.index] = [span.value for span in spans]
    later = np.abs(after / truth - 1)
    repeat = np.abs(rounds[1] / rounds[-1] - 1)
    unseen = np.setdiff1d(np.arange(len(shapes)), first)
    result = {
        "zero_shot": _median(zero), "after_passes": _median(later), "after_passes_unseen_shapes": _median(later[unseen]),
        "repeat": _median(repeat), "held_out_of_fit": round(fit.held_out_error, 4), "fit": fit.version,
        "decode_zero_shot": _median(zero[:12]), "prefill_zero_shot": _median(zero[12:]),
    }  # fmt: skip
    _say(f"{name}: {result}")
    return {**result, "errors": {"zero_shot": zero, "after_passes": later, "repeat": repeat}}


def _median(values: np.ndarray[Any, Any]) -> float:
    return round(float(np.median(values)), 4)


def _graph(name: str, dtype: str) -> tuple[ModelGraph, float]:
    """Graph with weights of the type that ran, and bytes of a cached value."""
    if name == SMOLLM2:
        config = json.loads((Path(prepare_model(name).folder) / "config.json").read_text(encoding="utf-8"))
    else:
        config = RANDOM[name]
    narrow = dtype == "bfloat16"
    graph = with_formats(graph_of(config, name), None if narrow else "fp32")
    return graph, 2.0 if narrow else 4.0


def _in_process(name: str, rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.bench_costmodel_cpu", "--worker", name, "--folder", str(out)]
    command += ["--rounds", str(rounds), "--threads", str(threads)]
    subprocess.run(command, env=process_environment(threads), check=True, timeout=600)
    made: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return made


def _measure(name: str, rounds: int, out: Path, threads: int) -> None:
    """The worker: every shape once a round, in a new order; writes ms [rounds, shapes] and the first round's order."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == SMOLLM2:
        ref = prepare_model(name)
        model = AutoModelForCausalLM.from_pretrained(ref.folder, dtype=getattr(torch, ref.dtype)).eval()
    else:
        config = dict(RANDOM[name])
        made = AutoConfig.for_model(config.pop("model_type"), **config)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    ms = np.zeros((rounds, len(SHAPES)))
    order, first = list(range(len(SHAPES))), list[int]()
    drawn = random.Random(7)
    with torch.inference_mode():
        caches = {shape: _cache(model, shape) for shape in SHAPES}
        for shape in SHAPES:  # one untimed pass of each: allocator, kernels' first calls
            _pass_ms(model, shape, caches[shape])
        for round_ in range(rounds):
            drawn.shuffle(order)
            first = first or list(order)
            for place in order:
                ms[round_, place] = _pass_ms(model, SHAPES[place], caches[SHAPES[place]])
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    out.write_text(json.dumps({"ms": ms.tolist(), "order": first, "dtype": dtype}), encoding="utf-8")


def _cache(model: Any, shape: tuple[str, int, int, int]) -> Any:
    """Of one sequence's own prefill, repeated for the others."""
    import torch
    from transformers import DynamicCache

    _, seqs, _, context = shape
    cache = DynamicCache(config=model.config)
    if context:
        prompt = torch.randint(int(model.config.vocab_size), (1, context))
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(seqs)
    return cache


def _pass_ms(model: Any, shape: tuple[str, int, int, int], cache: Any) -> float:
    """One pass on new tokens; the cache is as before afterwards."""
    import torch

    _, seqs, tokens, context = shape
    fresh = torch.randint(int(model.config.vocab_size), (seqs, tokens))
    kept = cache if context else type(cache)(config=model.config)
    begun = time.perf_counter()
    model(fresh, past_key_values=kept, use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - begun
    if context:
        cache.crop(-tokens)
    return seconds * 1e3


def _candidates(seconds: int, folder: Path) -> dict[str, Any]:
    """Kendall's tau between candidates' measured speedups and those predicted by a fit without the candidate."""
    import hotpass as hp

    out = folder / "campaign"
    hp.compile(SMOLLM2, "chat", f"{seconds}s", out=str(out), ray=False, quiet=True)
    state, known = read_state(out), {AS_LOADED.id: AS_LOADED, **all_candidates(out)}
    pairs = pairs_of(state.attempts, known)
    measured, predicted = [], []
    for one in {pair.candidate: pair for pair in pairs if pair.things != pair.against}.values():
        effects = fit_effects([pair for pair in pairs if pair.candidate != one.candidate])
        measured.append(one.log_speedup + _lead(effects, one.against))
        predicted.append(effects.log_speedup(one.things, frozenset())[0])
    tau = kendall_tau(measured, predicted)
    errors = [abs(math.expm1(a - b)) for a, b in zip(predicted, measured, strict=True)]
    result = {
        "candidates": len(measured), "tau": None if tau is None else round(tau, 3),
        "median_error": round(float(np.median(errors)), 4) if errors else None, "attempts": len(state.attempts),
    }  # fmt: skip
    _say(f"candidates: {result}")
    return result


def _lead(effects: Any, things: frozenset[str]) -> float:
    """Log speedup of what a candidate was measured against."""
    return float(effects.log_speedup(things, frozenset())[0])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="over all shapes; the first is learned from")
    parser.add_argument("--threads", type=int, default=0, help="0: as engines have")
    parser.add_argument("--microbench-seconds", type=float, default=110.0)
    parser.add_argument("--kernels", type=Path, help="a file of `hotpass microbench`, instead of timing again")
    parser.add_argument("--campaign-seconds", type=int, default=150, help="0: no candidates")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rounds < 3:
        parser.error(f"--rounds {given.rounds}: one is learned from and a repeat needs two more; give at least 3")
    return given


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
