"""One function an engine: from models on disk to measured rows, tuned with comparable care, at the weights that it can hold.

Each is a process of its own. Tunings swept: threads; KV type; flash attention and micro-batch (llama.cpp), attention backend
(OpenVINO), eager or compiled graphs and block size (vLLM), compiled or eager (transformers). An engine that is missing, or
does not run here, raises `Absent` with the reason.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines import installs
from benchmarks.baselines.installs import Absent
from benchmarks.baselines.processes import Measured, run_module, run_tool
from benchmarks.baselines.sweep import POINTS, Point, Row, Tuning, say
from engines.prepare.store import PACKED_FILE
from hotpass.records.deployment import ModelRef


@dataclass(frozen=True, kw_only=True)
class Models:
    """The same model in the forms that engines read."""

    gguf: Path
    """The file as published."""
    full: ModelRef
    """Its values in float32."""
    bf16: ModelRef
    """Its values rounded to bf16: another deployment."""
    tokens: tuple[int, ...]
    """A text that logits are compared on."""
    folder: Path
    """For files that conversions write."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much time goes into one variant."""

    threads: tuple[int, ...]
    """Thread counts to try, the likeliest first."""
    repeats: int
    sweep_seconds: float
    turn: Callable[[str], object] | None = None
    """Called with a point's name after each repeat of it, while the engine waits: hotpass's part measures the same point then."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An engine with one choice of weights."""

    engine: str
    name: str
    model: str
    """`full` or `bf16`: which values it is judged against."""
    weights: str
    """What the engine streams, as `Q4_1 blocks` or `bfloat16`."""
    versions: Callable[[bool], Mapping[str, str]]
    """(may install) → what identifies the engine. Raises Absent."""
    run: Callable[[Models, Effort], Measured]
    is_baseline: bool = True
    """False for another model than the deployment's (requantised weights): a speed reference only."""
    notes: str = field(default="")


def _orders(models: Models, effort: Effort, **more: Any) -> dict[str, Any]:
    return {
        "tokens": list(models.tokens),
        "threads": list(effort.threads),
        "repeats": effort.repeats,
        "seconds": effort.sweep_seconds,
        "points": [point.name for point in POINTS],
        **more,
    }


# transformers, in this environment


def reference_logits(model: ModelRef, models: Models, threads: int) -> np.ndarray:
    """The model's own values computed in float32 by transformers: what accuracy is measured against."""
    effort = Effort(threads=(threads,), repeats=1, sweep_seconds=0)
    orders = _orders(models, effort, model=model.folder, dtype="float32", points=[])
    found = run_module(Path(sys.executable), "run_transformers", orders).logits
    assert found is not None
    return found


def transformers_compiled(model: str, dtype: str) -> Callable[[Models, Effort], Measured]:
    def run(models: Models, effort: Effort) -> Measured:
        orders = _orders(models, effort, model=getattr(models, model).folder, dtype=dtype)
        return run_module(Path(sys.executable), "run_transformers", orders, turn=effort.turn)

    return run


def _versions_here(_: bool) -> Mapping[str, str]:
    return installs.versions(Path(sys.executable), ("torch", "transformers"))


# vLLM and OpenVINO GenAI


def vllm(model: str, dtype: str) -> Callable[[Models, Effort], Measured]:
    def run(models: Models, effort: Effort) -> Measured:
        python = installs.environment(installs.VLLM, make=False)
        folder = _without_blocks(getattr(models, model), models.folder / f"vllm-{model}")
        orders = _orders(models, effort, model=str(folder), dtype=dtype)
        return run_module(python, "run_vllm", orders, turn=effort.turn)

    return run


def _without_blocks(model: ModelRef, folder: Path) -> Path:
    """The prepared folder without packed.safetensors: vLLM takes every safetensors file for weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in Path(model.folder).iterdir():
        if item.name != PACKED_FILE and not (folder / item.name).exists():
            (folder / item.name).symlink_to(item)
    return folder


def openvino(kind: str, precision: str) -> Callable[[Models, Effort], Measured]:
    def run(models: Models, effort: Effort) -> Measured:
        python = installs.environment(installs.OPENVINO, make=False)
        # The pipeline writes its own form beside the file, so the file gets a folder of its own.
        file = _as(models, kind)
        place = models.folder / f"openvino-{kind}" / "model.gguf"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, place)
        orders = _orders(models, effort, model=str(place), precision=precision)
        return run_module(python, "run_openvino", orders, turn=effort.turn)

    return run


def _versions_of(install: installs.Install) -> Callable[[bool], Mapping[str, str]]:
    return lambda make: installs.versions(installs.environment(install, make=make), install.versions_of)


# llama.cpp


def llama_cpp(kind: str) -> Callable[[Models, Effort], Measured]:
    def run(models: Models, effort: Effort) -> Measured:
        built = installs.llama_cpp(make=False)
        file = _as(models, kind)
        rows = [_llama_row(built, file, point, effort) for point in POINTS]
        orders = _orders(models, effort, model=str(file))
        os.environ["LLAMA_CPP_LIB_PATH"] = str(built.tools)
        try:
            found = run_module(built.python, "run_llama_cpp", orders, (built.bindings,))  # logits only
        except Absent as error:
            return Measured(rows=rows, no_logits=str(error))
        return Measured(rows=rows, logits=found.logits)

    return run


def _versions_llama(make: bool) -> Mapping[str, str]:
    installs.llama_cpp(make=make)
    return {"llama-cpp-python": installs.LLAMA_CPP_PYTHON}


def _as(models: Models, kind: str) -> Path:
    """The GGUF with its matrices in another type, by llama.cpp's own tool; `gguf` is the file as published."""
    if kind == "gguf":
        return models.gguf
    target = models.folder / f"{models.gguf.stem}.{kind}.gguf"
    if not target.exists():
        tool = installs.llama_cpp(make=False).tools / "llama-quantize"
        making = target.with_suffix(".making")
        run_tool([str(tool), "--allow-requantize", str(models.gguf), str(making), kind])
        making.rename(target)
    return target


def _llama_tunings(point: Point, effort: Effort) -> Iterator[Tuning]:
    micro_batches = (512, 256, 128) if point.phase == "prefill" else (512,)
    for threads, flash, kv, micro in itertools.product(effort.threads, (0, 1), ("f16", "f32"), micro_batches):
        yield {"threads": threads, "flash_attention": flash, "kv": kv, "micro_batch": micro}


def _llama_row(built: installs.LlamaCpp, file: Path, point: Point, effort: Effort) -> Row:
    """Its own tools' figure: llama-bench for one sequence, llama-batched-bench for several."""
    swept: list[dict[str, Any]] = []
    start = time.monotonic()
    for tuning in _llama_tunings(point, effort):
        if swept and time.monotonic() - start > effort.sweep_seconds / len(POINTS):
            say(f"sweep of {point.name} stopped, before {tuning}")
            break
        try:
            swept.append({"tuning": tuning, "tokens_per_s": max(_llama_bench(built, file, point, tuning, 1))})
        except Absent as error:
            say(f"llama.cpp {tuning}: {error}")
            swept.append({"tuning": tuning, "failed": str(error)})
    worked = [item for item in swept if "tokens_per_s" in item]
    if not worked:
        raise Absent(f"no tuning ran {point.name}: {swept[0]['failed']}")
    best = max(worked, key=lambda item: item["tokens_per_s"])["tuning"]
    values = []
    for _ in range(effort.repeats):
        values.append(max(_llama_bench(built, file, point, best, 1)))
        if effort.turn is not None:
            effort.turn(point.name)
    return Row(point.name, best, values, swept)


def _llama_bench(built: installs.LlamaCpp, file: Path, point: Point, tuning: Tuning, repeats: int) -> list[float]:
    common = ["-m", str(file), "-t", str(tuning["threads"]), "-ub", str(tuning["micro_batch"])]
    common += ["-ctk", tuning["kv"], "-ctv", tuning["kv"]]
    if point.num_seqs == 1:
        shape = ["-p", "0", "-n", str(point.steps), "-d", str(point.context)]
        if point.phase == "prefill":
            shape = ["-p", str(point.context), "-n", "0"]
        flags = ["-fa", str(tuning["flash_attention"]), "-r", str(repeats), "-o", "json"]
        done = run_tool([str(built.tools / "llama-bench"), *common, *shape, *flags])
        return [float(value) for value in json.loads(done.stdout)[0]["samples_ts"]]
    shape = ["-npp", str(point.context), "-ntg", str(point.steps), "-npl", str(point.num_seqs), "-c", "4096"]
    flags = ["-fa", "on" if tuning["flash_attention"] else "off", "--output-format", "jsonl"]
    values = []
    for _ in range(repeats):
        done = run_tool([str(built.tools / "llama-batched-bench"), *common, *shape, *flags])
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        values.append(float(json.loads(line)["speed_tg"]))
    return values


VARIANTS = (
    Variant(
        engine="transformers", name="compiled-fp32", model="full", weights="float32",
        versions=_versions_here, run=transformers_compiled("full", "float32"),
    ),
    Variant(
        engine="transformers", name="compiled-bf16", model="bf16", weights="bfloat16",
        versions=_versions_here, run=transformers_compiled("bf16", "bfloat16"),
    ),
    Variant(
        engine="llama.cpp", name="gguf", model="full", weights="the file's blocks",
        versions=_versions_llama, run=llama_cpp("gguf"), notes="activations are quantised to 8 bits",
    ),
    Variant(
        engine="llama.cpp", name="f32", model="full", weights="float32", versions=_versions_llama, run=llama_cpp("F32")
    ),
    Variant(
        engine="llama.cpp", name="bf16", model="bf16", weights="bfloat16", versions=_versions_llama, run=llama_cpp("BF16")
    ),
    Variant(
        engine="llama.cpp", name="q4_0", model="full", weights="Q4_0 requantised", versions=_versions_llama,
        run=llama_cpp("Q4_0"), is_baseline=False, notes="another model: a speed reference",
    ),
    Variant(
        engine="openvino", name="gguf-f32", model="full", weights="the file's blocks as OpenVINO holds them",
        versions=_versions_of(installs.OPENVINO), run=openvino("gguf", "f32"),
    ),
    Variant(
        engine="openvino", name="gguf-bf16", model="full", weights="the file's blocks as OpenVINO holds them",
        versions=_versions_of(installs.OPENVINO), run=openvino("gguf", "bf16"), notes="computes in bf16",
    ),
    Variant(
        engine="openvino", name="f16", model="full", weights="float16", versions=_versions_of(installs.OPENVINO),
        run=openvino("F16", "f32"),
    ),
    Variant(
        engine="vllm", name="fp32", model="full", weights="float32", versions=_versions_of(installs.VLLM),
        run=vllm("full", "float32"),
    ),
    Variant(
        engine="vllm", name="bf16", model="bf16", weights="bfloat16", versions=_versions_of(installs.VLLM),
        run=vllm("bf16", "bfloat16"),
    ),
)  # fmt: skip
"""Every engine with every choice of weights."""
