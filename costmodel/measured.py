"""Measured rows of whole engines, and what the cost model predicts for each: the basis of `--validate` and of calibration.

A row names model, system, backend, precision, lengths, concurrency and parallelism, as in the public sample of aiconfigurator. What
a row leaves open is read the same way for every row, never by what was measured:

* `tp` = `dp` = k with k² experts' ranks, or `moe_tp` = `moe_ep` = k: the columns hold products, the group has k ranks;
* no attention data parallelism given: what the experts' ranks leave over `tp`; where neither settles it for a latent-attention
  model in a disaggregated row, whichever of the two the model predicts to be faster (an operator would choose it);
* disaggregated rows without numbers of workers: as few decode workers as hold the caches, as many prefill workers as keep up. Such
  rows are `open`: neither that nor whether drafts were used (speculative decoding) can be known, and their intervals are wider.
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
from costmodel.machine import TABLE_NAMES, named_machine
from costmodel.operators import Kind, Layout, Roofline, source_for
from costmodel.plans import memory_of, with_formats
from costmodel.serving import Load, burst_wait, closed_loop, passes, queue_wait
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
MEAN_LENGTH = 0.9
"""Of the lengths that InferenceMAX names: it draws them evenly between 0.8 and 1.0 of these (its README: RANDOM_RANGE_RATIO 0.8)."""
DRAWN = ("source_file=20", "db-dump")
"""How the source of rows of that harness begins."""


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
    `prefill_gemm_ms`, …) and by what else adds to them (`interference_ms`, `beside_ms`, `queue_ms`, `burst_ms`), and the spread of the sources."""
    made = pd.DataFrame(index=rows.index)
    made["refused"] = ""
    facts = rows.apply(_facts, axis=1, result_type="expand")
    for _, group in facts.groupby(["model", "system", "backend", "weights"], sort=False):
        first = group.iloc[0]
        try:
            graph = with_formats(graph_for(first.model), None if first.weights == "shipped" else first.weights)
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
    prefill = _group(row, "prefill_" if apart else "")
    decode = _group(row, "decode_" if apart else "")
    said = str(row.get("silicon_data_source", "")).partition("silicon_concurrency=")[2].partition(";")[0]
    batch = _number(row, "decode_batch_size" if apart else "batch_size", 1.0)
    clients = float(said) if said.isdigit() else batch * (decode["dp"] if decode["dp"] > 0 else 1)
    drawn = MEAN_LENGTH if str(row.get("silicon_data_source", "")).startswith(DRAWN) else 1.0
    system = {folder: name for name, folder in TABLE_NAMES.items()}.get(str(row["system"]), str(row["system"]))
    model = SHAPES.get(str(row["model_path"]), str(row["model_path"]))
    return {
        "model": model, "system": system, "backend": str(row["backend"]), "weights": _weights(row, model),
        "disaggregated": apart, "isl": drawn * float(row["isl"]), "osl": drawn * float(row["osl"]), "clients": clients,
        "cache_bytes": 1.0 if row["backend"] == "trtllm" and str(row.get("precision")) in ("fp8", "fp4") else 2.0,
        "prefill_workers": _number(row, "prefill_num_workers", 0.0), "decode_workers": _number(row, "decode_num_workers", 1.0),
        "open": bool(apart and not _number(row, "decode_num_workers", 0.0)),
        **{f"p_{name}": value for name, value in prefill.items()}, **{f"d_{name}": value for name, value in decode.items()},
    }  # fmt: skip


def _number(row: pd.Series, name: str, default: float) -> float:
    value = row.get(name)
    return default if value is None or pd.isna(value) or not value else float(value)


def _group(row: pd.Series, prefix: str) -> dict[str, float]:
    """(tp, dp, moe_tp, ep) of one worker, and whether attention data parallelism was settled (see the module's head)."""
    tp, moe_tp, ep = (_number(row, prefix + name, 1.0) for name in ("tp_size", "moe_tp_size", "moe_ep_size"))
    given = row.get(prefix + "attention_dp_size")
    dp = _number(row, prefix + "attention_dp_size", 0.0)
    settled = 1.0 if dp > 1 or (given is not None and not pd.isna(given) and prefix == "") else 0.0
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
    decode_s: Floats
    prefill_s: Floats
    parts: dict[str, Floats]
    spread: Floats


def _priced(
    part: pd.DataFrame, graph: ModelGraph, source: Roofline, decode_layout: Layout, prefill_layout: Layout
) -> _Priced:
    """Both passes of every row, each at its own lengths."""
    size = len(part)
    decode_s, prefill_s, spread = np.zeros(size), np.zeros(size), np.zeros(size)
    parts = {f"{phase}_{kind}_ms": np.zeros(size) for phase in ("decode", "prefill") for kind in Kind}
    place = np.arange(size)
    for (isl, osl, cache), rows in part.assign(_place=place).groupby(["isl", "osl", "cache_bytes"]):
        at = rows._place.to_numpy()
        clients: Floats = (rows.clients / np.where(rows.disaggregated, rows.decode_workers, 1.0)).to_numpy(float)
        load = Load(input_tokens=float(isl), output_tokens=float(osl))
        decode, _ = passes(graph, decode_layout.take(at), source, load, clients, kv_bytes=float(cache))
        _, prefill = passes(graph, prefill_layout.take(at), source, load, clients, kv_bytes=float(cache))
        decode_s[at], prefill_s[at] = decode.seconds, prefill.seconds
        spread[at] = np.maximum(decode.spread(), prefill.spread())
        for phase, done in (("decode", decode), ("prefill", prefill)):
            for kind, seconds in done.by_kind().items():
                parts[f"{phase}_{kind}_ms"][at] = seconds * 1e3
    return _Priced(decode_s=decode_s, prefill_s=prefill_s, parts=parts, spread=spread)


def _together(part: pd.DataFrame, graph: ModelGraph, source: Roofline) -> dict[str, Floats]:
    layout = _layout(part, "d")
    priced = _priced(part, graph, source, layout, layout)
    waiting = np.maximum(part.clients.to_numpy(float) / layout.dp, 1.0)
    osl = part.osl.to_numpy(float)
    isl = part.isl.to_numpy(float)
    loop = closed_loop(waiting, priced.prefill_s, priced.decode_s, isl, osl)
    burst = BURST_SHARE * burst_wait(waiting, priced.prefill_s, priced.decode_s, isl)
    return {
        "tpot_ms": 1e3 * loop.tpot_s, "ttft_ms": 1e3 * (loop.ttft_s + burst), "interference_ms": 1e3 * loop.interference_s,
        "beside_ms": 1e3 * loop.beside_s, "queue_ms": 1e3 * loop.queue_s, "burst_ms": 1e3 * burst, "waiting": waiting,
        "gpus": layout.gpus.astype(float), "clients": part.clients.to_numpy(float), "open": np.zeros(len(part)),
        "spread": priced.spread, **priced.parts, **_fit(part, graph, source, layout),
    }  # fmt: skip


def _apart(part: pd.DataFrame, graph: ModelGraph, source: Roofline) -> dict[str, Floats]:
    prefill_layout, decode_layout = _layout(part, "p"), _layout(part, "d")
    spread_out = _layout(part, "d", data_parallel=(part.d_settled == 0).to_numpy())
    least = np.ceil(_fit(part, graph, source, spread_out)["memory_share"] - 1e-9)
    part = part.assign(decode_workers=np.where(part.open, least, part.decode_workers))
    priced = _priced(part, graph, source, decode_layout, prefill_layout)
    if any(layer.attention and layer.attention.kind is not AttentionKind.GQA for _, layer in graph.layers):
        open_ = ((part.d_settled == 0) & (part.d_dp == 1) & (part.d_tp > 1)).to_numpy()
        other_layout = _layout(part, "d", data_parallel=open_)
        other = _priced(part, graph, source, other_layout, prefill_layout)
        if ((other.decode_s < priced.decode_s) & open_).any():
            better = (other.decode_s < priced.decode_s) & open_
            decode_layout = _layout(part, "d", data_parallel=better)
            priced = _priced(part, graph, source, decode_layout, prefill_layout)
    osl, clients = part.osl.to_numpy(float), part.clients.to_numpy(float)
    rate = clients / (osl * priced.decode_s)
    given = part.prefill_workers.to_numpy(float)
    workers = np.where(given > 0, given, np.ceil(rate * priced.prefill_s / prefill_layout.dp / 0.85))
    lanes = np.maximum(workers, 1.0) * prefill_layout.dp
    service, sent = priced.prefill_s / lanes, np.maximum(clients, 1.0)
    queue = queue_wait(sent, service, osl * priced.decode_s)
    burst = BURST_SHARE * 0.5 * (sent - 1.0) * service
    gpus = prefill_layout.gpus * np.maximum(workers, 1.0) + decode_layout.gpus * part.decode_workers.to_numpy(float)
    return {
        "tpot_ms": 1e3 * priced.decode_s,
        "ttft_ms": 1e3 * (priced.prefill_s + queue + burst + priced.decode_s),
        "interference_ms": np.zeros(len(part)), "beside_ms": 1e3 * priced.decode_s, "queue_ms": 1e3 * queue,
        "burst_ms": 1e3 * burst, "waiting": np.maximum(clients / lanes, 1.0), "gpus": gpus, "clients": clients,
        "open": part.open.to_numpy(float), "spread": priced.spread, **priced.parts, **_fit(part, graph, source, decode_layout),
    }  # fmt: skip


def _fit(part: pd.DataFrame, graph: ModelGraph, source: Roofline, layout: Layout) -> dict[str, Floats]:
    """Share of the memory that the row needs: above 1 it could not have run as it was read."""
    context = float((part.isl + part.osl).mean())
    each: Floats = (part.clients / np.where(part.disaggregated, part.decode_workers, 1.0)).to_numpy(float)
    memory = memory_of(
        graph, layout, concurrency=each, context=context, kv_bytes=1.0, chunk_tokens=2048,
        reserved_bytes=source.machine.reserved_bytes,
    )  # fmt: skip
    return {"memory_share": memory.total / source.machine.memory_bytes}
