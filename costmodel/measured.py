"""Measured rows of whole engines, and what the cost model predicts for each: the basis of `--validate` and of calibration.

A row names model, system, backend, precision, lengths, concurrency and parallelism, as in the public sample of aiconfigurator, and may
say more: `drafts` (tokens a step that are proposed), `cache_bytes` (of a cached value), `chunk_tokens`, `max_sequences`, `poll_steps`
(steps between two looks for new requests), `fill_steps` (that a prompt waits for others). What a row leaves open is read the same way for every row, never by what was measured:

* `tp` = `dp` = k with k² experts' ranks, or `moe_tp` = `moe_ep` = k: the columns hold products, the group has k ranks;
* no attention data parallelism given: what the experts' ranks leave over `tp`; where neither settles it for a latent-attention
  model in a disaggregated row, whichever of the two the model predicts to be faster (an operator would choose it);
* rows of a harness that publishes its deployments are completed from what it publishes (`costmodel.inferencex`);
* disaggregated rows without numbers of workers: as few decode workers as hold the caches, as many prefill workers as keep up. Such
  rows are `open`: neither that nor whether drafts were used (speculative decoding) can be known, and their intervals are wider.

More clients than the caches hold wait outside: the batch is what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from costmodel.configs import load_graph
from costmodel.graph import AttentionKind, ModelGraph
from costmodel.inferencex import MEAN_LENGTH, TIMEOUT_STEPS, clients_of, completed, is_its
from costmodel.machine import TABLE_NAMES, named_machine
from costmodel.operators import Kind, Layout, Roofline, source_for
from costmodel.plans import memory_of, with_formats
from costmodel.serving import (
    ACCEPTED,
    CHUNK_TOKENS,
    Load,
    burst_wait,
    closed_loop,
    decode_step,
    prefill_step,
    queue_wait,
)
from hotpass.errors import InputError

Floats = NDArray[np.float64]

COLUMNS = ("backend", "model_path", "system", "mode", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms")
SHAPES: Mapping[str, str] = {
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-V3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-V3",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
    "moonshotai/Kimi-K2.5": "moonshotai/Kimi-K2-Instruct",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""Name in the rows → name of a configuration with the same shapes."""
BURST_SHARE = 0.1
"""Of a benchmark's requests that arrive at once at its start: closed-loop harnesses send ten times as many as there are clients."""
USED_SHARE = 0.9
"""Of an accelerator's memory: engines take nine tenths unless told otherwise."""


def architecture(model: str) -> str:
    """What counts as one architecture when a calibration leaves one out."""
    return SHAPES.get(model, model)


def read_rows(path: Path) -> pd.DataFrame:
    """The rows of a CSV (plain or gzip) or Parquet file. Raises InputError for a torn file or missing columns."""
    try:
        rows = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, EOFError, UnicodeDecodeError) as error:
        raise InputError(
            "--validate", path, f"cannot be read ({str(error).splitlines()[0]})", "give CSV or Parquet"
        ) from None
    for column in COLUMNS:
        if column not in rows:
            raise InputError("--validate", path, f"has no column {column}", f"needed: {', '.join(COLUMNS)}")
    return rows.reset_index(drop=True)


def predict_rows(rows: pd.DataFrame, graph_for: Callable[[str], ModelGraph] = load_graph) -> pd.DataFrame:
    """For each row: `ttft_ms`, `tpot_ms`, `refused` (reason, or empty), the parts by kind of operator (`decode_gemm_ms`, …,
    `prefill_gemm_ms`, …) and by what else adds to them (`interference_ms`, `beside_ms`, `queue_ms`, `held_ms`,
    `burst_ms`), `prefill_calls` (operators that the host starts for a prompt, chunk by chunk), and the spread of the sources."""
    made = pd.DataFrame(index=rows.index)
    made["refused"] = ""
    facts = completed(rows).apply(_facts, axis=1, result_type="expand")
    unknown: dict[str, str] = {}  # looked for once: the hub may take long to say so
    for _, group in facts.groupby(["model", "system", "backend", "weights"], sort=False):
        first = group.iloc[0]
        if first.model in unknown:
            made.loc[group.index, "refused"] = unknown[first.model]
            continue
        try:
            plain = graph_for(first.model)
        except InputError as error:
            made.loc[group.index, "refused"] = unknown[first.model] = str(error)
            continue
        try:
            graph = with_formats(plain, None if first.weights == "shipped" else first.weights)
            machine = named_machine(first.system)
        except InputError as error:
            made.loc[group.index, "refused"] = str(error)
            continue
        reasons = _refusals(group, graph)
        made.loc[group.index, "refused"] = reasons
        good = group[reasons == ""]
        if len(good):
            source = source_for(machine, first.backend)
            for mode, part in good.groupby("disaggregated"):
                found = _apart(part, graph, source) if mode else _together(part, graph, source)
                for name, values in found.items():
                    made.loc[part.index, name] = values
    return made


def _facts(row: pd.Series) -> dict[str, object]:
    """A row in the cost model's own words."""
    apart = row["mode"] == "disagg"
    told = _number(row, "decode_num_workers", 0.0) > 0
    prefill, decode = (_group(row, side if apart else "", told) for side in ("prefill_", "decode_"))
    batch = _number(row, "decode_batch_size" if apart else "batch_size", 1.0)
    drawn = MEAN_LENGTH if is_its(row) else 1.0
    system = {folder: name for name, folder in TABLE_NAMES.items()}.get(str(row["system"]), str(row["system"]))
    model = SHAPES.get(str(row["model_path"]), str(row["model_path"]))
    narrow = row["backend"] == "trtllm" and str(row.get("precision")) in ("fp8", "fp4")
    return {
        "model": model, "system": system, "backend": str(row["backend"]), "weights": _weights(row, model),
        "disaggregated": apart, "isl": drawn * float(row["isl"]), "osl": drawn * float(row["osl"]),
        "clients": clients_of(row) or batch * (decode["dp"] if decode["dp"] > 0 else 1),
        "cache_bytes": _number(row, "cache_bytes", 1.0 if narrow else 2.0), "drafts": _number(row, "drafts", 0.0),
        "chunk": _number(row, "chunk_tokens", float(CHUNK_TOKENS)), "most": _number(row, "max_sequences", np.inf),
        "poll": _number(row, "poll_steps", 0.0), "fill": _number(row, "fill_steps", 0.0), "balances": bool(row["backend"] == "trtllm" and is_its(row)),
        "prefill_workers": _number(row, "prefill_num_workers", 0.0), "decode_workers": _number(row, "decode_num_workers", 1.0),
        "open": bool(_number(row, "open", 0.0)) or (apart and not told),
        **{f"p_{name}": value for name, value in prefill.items()}, **{f"d_{name}": value for name, value in decode.items()},
    }  # fmt: skip


def _number(row: pd.Series, name: str, default: float) -> float:
    value = row.get(name)
    return default if value is None or pd.isna(value) or not value else float(value)


def _group(row: pd.Series, prefix: str, told: bool) -> dict[str, float]:
    """(tp, dp, moe_tp, ep) of one worker, and whether attention data parallelism was settled (see the module's head)."""
    tp, moe_tp, ep = (_number(row, prefix + name, 1.0) for name in ("tp_size", "moe_tp_size", "moe_ep_size"))
    given = row.get(prefix + "attention_dp_size")
    dp = _number(row, prefix + "attention_dp_size", 0.0)
    settled = 1.0 if dp > 1 or (given is not None and not pd.isna(given) and (prefix == "" or told)) else 0.0
    if moe_tp == ep > 1 and tp * max(dp, 1.0) == ep * ep:
        tp, dp, moe_tp = (1.0, ep, 1.0) if dp > 1 else (ep, 1.0, 1.0)
    elif dp > 1 and tp == dp and moe_tp * ep == tp * dp and ep == dp * dp:
        tp, ep = 1.0, dp
    if dp == 0.0:
        dp = max(1.0, moe_tp * ep / tp)
    if moe_tp * ep != tp * dp:
        moe_tp = max(1.0, tp * dp / ep)
    return {"tp": tp, "dp": dp, "moe_tp": moe_tp, "ep": ep, "settled": settled}


def _weights(row: pd.Series, model: str) -> str:
    """Weight format of the checkpoint that such rows were measured with."""
    precision, gemm = str(row.get("precision")), str(row.get("gemm_quant_mode"))
    if model.startswith("openai/gpt-oss"):
        return "shipped"
    if precision == "fp4" or "NVFP4" in str(row["model_path"]):
        return "nvfp4"
    if precision == "int4":
        return "int4"
    if precision == "fp8" or "FP8" in str(row["model_path"]):
        dense = model.startswith("meta-llama/") or (model == "Qwen/Qwen3-32B" and gemm != "fp8_block")
        return "fp8" if dense else "fp8_block"
    return "bf16"


def _refusals(group: pd.DataFrame, graph: ModelGraph) -> pd.Series:
    """Why a row is not answered; empty where it is."""
    heads = [layer.attention.heads for _, layer in graph.layers if layer.attention]
    reasons = pd.Series("", index=group.index)
    for side in ("p", "d"):
        bad = pd.Series([any(h % int(tp) for h in heads) for tp in group[f"{side}_tp"]], index=group.index)
        reasons = reasons.mask(bad, "its tensor parallelism does not divide the attention heads")
        whole = group[f"{side}_tp"] * group[f"{side}_dp"]
        unlike = (whole % group[f"{side}_ep"]) != 0
        reasons = reasons.mask(unlike, "its experts' ranks are not its attention's ranks")
    invalid = (group.isl < 1) | (group.osl < 1) | (group.clients < 1)
    return reasons.mask(invalid, "its lengths or concurrency are not positive")


def _layout(part: pd.DataFrame, side: str, *, data_parallel: NDArray[np.bool_] | None = None) -> Layout:
    tp, dp, ep, moe_tp = (part[f"{side}_{name}"].to_numpy(np.int64) for name in ("tp", "dp", "ep", "moe_tp"))
    if data_parallel is not None:
        dp, tp = np.where(data_parallel, tp * dp, dp), np.where(data_parallel, 1, tp)
    one = np.ones_like(tp)
    return Layout(tp=tp, dp=dp, pp=one, moe_tp=moe_tp, ep=ep, dcp=one, all_to_all=(dp > 1) & (ep > 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Priced:
    """Both passes of every row, each at its own lengths."""

    decode_s: Floats
    """A step, drafts and all."""
    accepted: Floats
    """Tokens of a sequence that a step yields."""
    prefill_s: Floats
    """A prompt alone."""
    crowded_s: Floats
    """A prompt among as many as fill a chunk."""
    inside: Floats
    """Sequences of a group at once: what the caches and the engine's limit hold of its clients."""
    parts: dict[str, Floats]
    """By kind of operator, ms: decode's of a token, prefill's of a prompt; and `prefill_calls`."""
    spread: Floats


def _priced(
    part: pd.DataFrame, graph: ModelGraph, source: Roofline, decode_layout: Layout, prefill_layout: Layout
) -> _Priced:
    size = len(part)
    decode_s, prefill_s, crowded_s, spread = (np.zeros(size) for _ in range(4))
    names = [f"{phase}_{kind}_ms" for phase in ("decode", "prefill") for kind in Kind]
    parts = {name: np.zeros(size) for name in (*names, "prefill_calls")}
    place = np.arange(size)
    each: Floats = (part.clients / np.where(part.disaggregated, part.decode_workers, 1.0)).to_numpy(float)
    group = each / decode_layout.dp
    inside = np.maximum(np.minimum(group, _room(part, graph, source, decode_layout)), 1.0)
    accepted = np.array(ACCEPTED)[part.drafts.to_numpy(int)]
    for lengths, rows in part.assign(_place=place).groupby(["isl", "osl", "cache_bytes", "drafts"]):
        isl, osl, cache, drafts = (float(str(value)) for value in lengths)
        at = rows._place.to_numpy()
        load = Load(input_tokens=isl, output_tokens=osl)
        layout = decode_layout.take(at)
        decode = decode_step(
            graph, layout, source, load, inside[at] * layout.dp, kv_bytes=cache, drafts=int(drafts)
        )  # fmt: skip
        taken = prefill_layout.take(at)
        prefill = prefill_step(graph, taken, source, load, kv_bytes=cache)
        parts["prefill_calls"][at] = prefill.calls * np.maximum(np.ceil(isl / rows.chunk.to_numpy(float)), 1.0)
        many = np.maximum(np.floor(rows.chunk.to_numpy(float) / isl), 1.0)
        crowd = prefill_step(graph, taken, source, load, kv_bytes=cache, prompts=many)
        decode_s[at], prefill_s[at], crowded_s[at] = decode.seconds, prefill.seconds, crowd.seconds / many
        spread[at] = np.maximum(decode.spread(), prefill.spread())
        for phase, done, yields in (("decode", decode, accepted[at]), ("prefill", prefill, 1.0)):
            for kind, seconds in done.by_kind().items():
                parts[f"{phase}_{kind}_ms"][at] = seconds * 1e3 / yields
    return _Priced(
        decode_s=decode_s, accepted=accepted, prefill_s=prefill_s, crowded_s=np.minimum(crowded_s, prefill_s), inside=inside,
        parts=parts, spread=spread,
    )  # fmt: skip


def _room(part: pd.DataFrame, graph: ModelGraph, source: Roofline, layout: Layout) -> Floats:
    """Sequences of a group whose caches fit beside the weights, and that the engine admits: at their mean context, or, where the
    scheduler reserves the whole answer (TensorRT-LLM's guaranteed no-evict), at their longest."""
    found = np.zeros(len(part))
    place = np.arange(len(part))
    for lengths, rows in part.assign(_place=place).groupby(["isl", "osl", "cache_bytes"]):
        isl, osl, cache = (float(str(value)) for value in lengths)
        at = rows._place.to_numpy()
        taken = layout.take(at)
        memory = memory_of(
            graph, taken, concurrency=taken.dp.astype(float), kv_bytes=cache, chunk_tokens=CHUNK_TOKENS, reserved_bytes=0.0,
            context=isl + osl * (1.0 if rows.backend.iloc[0] == "trtllm" else 0.5),
        )  # fmt: skip
        used = USED_SHARE * source.machine.memory_bytes
        found[at] = (used - memory.weights - memory.working) / np.maximum(memory.cache, 1.0)
    return np.minimum(np.maximum(np.floor(found), 1.0), part.most.to_numpy(float) / layout.dp)


def _outside(priced: _Priced, clients: Floats, cycle_s: Floats) -> Floats:
    """Wait of clients beyond those that are served at once, each of which leaves after a cycle."""
    return cycle_s * np.maximum(clients / priced.inside - 1.0, 0.0)


def _together(part: pd.DataFrame, graph: ModelGraph, source: Roofline) -> dict[str, Floats]:
    layout = _layout(part, "d")
    priced = _priced(part, graph, source, layout, layout)
    isl, osl, chunk = (part[name].to_numpy(float) for name in ("isl", "osl", "chunk"))
    steps = osl / priced.accepted
    loop = closed_loop(priced.inside, priced.prefill_s, priced.decode_s, isl, steps, chunk_tokens=chunk)
    clients = np.maximum(part.clients.to_numpy(float) / layout.dp, 1.0)
    burst = BURST_SHARE * burst_wait(priced.inside, priced.crowded_s, priced.decode_s, isl, chunk)
    held = _held(part, layout, priced, steps)
    outside = _outside(priced, clients, loop.ttft_s + held + steps * loop.tpot_s)
    queue = loop.queue_s + outside
    return {
        "tpot_ms": 1e3 * loop.tpot_s / priced.accepted,
        "ttft_ms": 1e3 * (loop.prefill_s + loop.beside_s + queue + held + burst),
        "interference_ms": 1e3 * loop.interference_s / priced.accepted, "beside_ms": 1e3 * loop.beside_s,
        "queue_ms": 1e3 * queue, "held_ms": 1e3 * held, "burst_ms": 1e3 * burst, "waiting": priced.inside,
        "gpus": layout.gpus.astype(float), "clients": part.clients.to_numpy(float), "open": part.open.to_numpy(float),
        "spread": priced.spread, **priced.parts,
    }  # fmt: skip


def _held(part: pd.DataFrame, layout: Layout, priced: _Priced, steps: Floats) -> Floats:
    """What schedulers hold prompts back: an engine that looks for requests every so many steps lets them wait half of these, and takes
    those that came meanwhile at once; one that fills its steps waits so many for more prompts; one that balances attention groups waits
    until each has one, or until its patience ends."""
    poll, dp, fill = part.poll.to_numpy(float), layout.dp.astype(float), part.fill.to_numpy(float) * priced.decode_s
    others = np.maximum(priced.inside - 1.0, 0.0)
    polled = (
        0.5 * poll * priced.decode_s * others / priced.inside
        + np.minimum(poll / steps, 1.0) * others * priced.prefill_s
    )
    # The last of n groups gets its prompt after the n-th harmonic number of mean gaps.
    harmonic = np.where(dp > 1, np.log(dp) + 0.577 + 0.5 / dp, 0.0)
    until = np.minimum(harmonic * steps / priced.inside, TIMEOUT_STEPS)
    balanced = 0.5 * until * priced.decode_s * (part.balances.to_numpy(bool) & (dp > 1))
    return np.asarray(polled + balanced + fill * others / priced.inside, np.float64)


def _apart(part: pd.DataFrame, graph: ModelGraph, source: Roofline) -> dict[str, Floats]:
    prefill_layout, decode_layout = _layout(part, "p"), _layout(part, "d")
    spread_out = _layout(part, "d", data_parallel=(part.d_settled == 0).to_numpy())
    least = np.ceil(part.clients.to_numpy(float) / spread_out.dp / _room(part, graph, source, spread_out) - 1e-9)
    unknown = (part.prefill_workers == 0).to_numpy()
    part = part.assign(decode_workers=np.where(part.open & unknown, least, part.decode_workers))
    priced = _priced(part, graph, source, decode_layout, prefill_layout)
    if any(layer.attention and layer.attention.kind is not AttentionKind.GQA for _, layer in graph.layers):
        open_ = ((part.d_settled == 0) & (part.d_dp == 1) & (part.d_tp > 1)).to_numpy()
        other = _priced(part, graph, source, _layout(part, "d", data_parallel=open_), prefill_layout)
        if ((other.decode_s < priced.decode_s) & open_).any():
            better = (other.decode_s < priced.decode_s) & open_
            decode_layout = _layout(part, "d", data_parallel=better)
            priced = _priced(part, graph, source, decode_layout, prefill_layout)
    clients, workers = part.clients.to_numpy(float), part.decode_workers.to_numpy(float)
    answer_s = part.osl.to_numpy(float) / priced.accepted * priced.decode_s
    rate = np.minimum(clients, priced.inside * decode_layout.dp * workers) / answer_s
    given = part.prefill_workers.to_numpy(float)
    senders = np.where(given > 0, given, np.ceil(rate * priced.prefill_s / prefill_layout.dp / 0.85))
    lanes = np.maximum(senders, 1.0) * prefill_layout.dp
    service, sent = priced.crowded_s / lanes, np.maximum(clients, 1.0)
    queue = queue_wait(sent, service, answer_s)
    burst = BURST_SHARE * 0.5 * (sent - 1.0) * service
    each = clients / workers / decode_layout.dp
    queue = np.maximum(queue, _outside(priced, each, priced.prefill_s + answer_s))
    gpus = prefill_layout.gpus * np.maximum(senders, 1.0) + decode_layout.gpus * workers
    return {
        "tpot_ms": 1e3 * priced.decode_s / priced.accepted,
        "ttft_ms": 1e3 * (priced.prefill_s + queue + burst + priced.decode_s),
        "interference_ms": np.zeros(len(part)), "beside_ms": 1e3 * priced.decode_s, "queue_ms": 1e3 * queue,
        "held_ms": np.zeros(len(part)), "burst_ms": 1e3 * burst, "waiting": np.maximum(clients / lanes, 1.0), "gpus": gpus,
        "clients": clients, "open": part.open.to_numpy(float), "spread": priced.spread, **priced.parts,
    }  # fmt: skip
