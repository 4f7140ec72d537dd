"""Operator times from the kernel tables in aiconfigurator-core (extra `nvidia-tables`, Apache-2.0, measured by NVIDIA).

One backend's rows answer for that backend: rows of two are never mixed in one operator. Where a backend has no usable table of a
kind, the one that stands in for it is fixed and named (`SUBSTITUTES`). Whatever no table has goes by the roofline. Message sizes of
the tables are in elements; latencies in milliseconds. The package is only read as files, never imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from costmodel.machine import Machine
from costmodel.operators import bounds
from costmodel.operators.interpolated import Interpolated
from costmodel.operators.source import Roofline
from costmodel.operators.surface import Surface, build_surface
from hotpass.errors import InputError, nearest

BACKENDS = ("vllm", "sglang", "trtllm")
SUBSTITUTES: Mapping[tuple[str, str], str] = {
    ("vllm", "gemm:fp8_block"): "sglang",
    ("trtllm", "gemm:fp8"): "sglang",
    ("trtllm", "gemm:nvfp4"): "sglang",
    ("vllm", "mla"): "sglang",
}
"""(backend, table) → backend that stands in. vLLM's fp8_block products were timed with a launch floor of 55 to 240 µs, TensorRT-LLM's
fp8 with one of 12 µs, and its 4-bit products take longer than its own 16-bit ones of four times the bytes: more than the product was
timed. vLLM's attention over latents was timed only together with its projections."""

ABSENT: Mapping[str, int] = {"window_size": 0}
"""Columns that older tables lack, and what their rows mean: no sliding window."""

DTYPES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16",),
    "fp8": ("fp8",),
    "fp8_block": ("fp8_block",),
    "nvfp4": ("nvfp4",),
    "int4": ("int4_wo",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "fp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
}
"""Weight format → names in the tables, the first found."""


def tables_folder() -> Path | None:
    """Folder of the installed tables; None when the extra is not installed."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"
    return folder if folder.is_dir() else None


def _version(folder: Path) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.findall(r"\d+|[a-z]+", folder.name))


class Tables(Interpolated):
    """Measured kernels of one machine and backend, the roofline beyond them."""

    def __init__(self, machine: Machine, backend: str, root: Path) -> None:
        super().__init__(machine)
        if backend not in BACKENDS:
            raise InputError(
                "--backend", backend, "is not an engine with kernel tables", nearest(backend, list(BACKENDS))
            )
        self.backend, self.root = backend, root / str(machine.tables)
        self.name = f"kernel tables of {machine.name}, {backend}"

    # Tables as surfaces, each loaded once.

    def _files(self, op: str, name: str, backend: str) -> list[Path]:
        """Newest release first."""
        return sorted(
            self.root.glob(f"{op}/{backend}/*/{name}.parquet"), key=lambda path: _version(path.parent), reverse=True
        )

    def _rows(self, op: str, name: str, columns: list[str], *, stand_in: str = "", **equal: str) -> pd.DataFrame | None:
        """Rows of the newest release that has any with these values; None when there are none. A torn file is an InputError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        backend = SUBSTITUTES.get((self.backend, stand_in or op), self.backend)
        for path in self._files(op, name, backend):
            try:
                there = set(pq.read_schema(path).names)
                if not set(equal) <= there:
                    continue
                table = pq.read_table(
                    path,
                    columns=[name for name in columns if name in there],
                    filters=[(key, "==", value) for key, value in equal.items()] or None,
                )
            except (OSError, pa.ArrowException) as error:
                reason = str(error).splitlines()[0]
                raise InputError(
                    "kernel table", path, f"cannot be read ({reason})", "install the extra nvidia-tables again"
                ) from None
            missing = [name for name in columns if name not in there and name not in ABSENT]
            if missing:
                raise InputError(
                    "kernel table", path, f"has no column {missing[0]}", "install aiconfigurator-core==0.12.0"
                )
            if table.num_rows:
                if backend != self.backend:
                    self.notes.append(f"{stand_in or op}: {backend}'s table stands in for {self.backend}'s")
                frame: pd.DataFrame = table.to_pandas()
                return frame.assign(**{name: ABSENT[name] for name in columns if name not in there})
        return None

    def _load_gemm(self, fmt: str) -> Surface | None:
        for dtype in DTYPES.get(fmt, ()):
            rows = self._rows("gemm", "gemm_perf", ["m", "n", "k", "latency"], stand_in=f"gemm:{fmt}", gemm_dtype=dtype)
            if rows is not None:
                # Every second point of the tokens' axis is the first of a new tile (129 after 128): kept out, it would bend the line.
                rows = rows[(rows.m < 17) | (rows.m % 16 == 0)]
                rows["seconds"] = rows.latency / 1e3
                rows["bound"] = bounds.gemm(self.machine, fmt, rows.m, rows.n, rows.k)
                return build_surface(
                    rows, features=["n", "k"], weights=[1.0, 1.0], axes=["m"], seconds="seconds", bound="bound"
                )
        return None

    def _load_moe(self, what: str) -> Surface | None:
        fmt, _, gating = what.partition("/")
        matrices = 2.0 if gating == "plain" else 3.0
        shape = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
        for dtype in DTYPES.get(fmt, ()):
            rows = self._rows(
                "moe", "moe_perf", [*shape, "num_tokens", "latency", "kernel_source"], moe_dtype=dtype,
                distribution="power_law_1.01",
            )  # fmt: skip
            if rows is not None:
                rows = rows[rows.kernel_source.str.contains("nongated") == (gating == "plain")]
            if rows is not None and len(rows):
                rows["seconds"] = rows.latency / 1e3
                rows["bound"] = bounds.moe(
                    self.machine,
                    fmt,
                    rows.num_tokens,
                    rows.hidden_size,
                    rows.inter_size,
                    rows.topk,
                    rows.num_experts,
                    rows.moe_tp_size,
                    rows.moe_ep_size,
                    matrices,
                )
                return build_surface(
                    rows, features=shape, weights=[2.0, 1.0, 2.0, 2.0, 1.0, 1.0], axes=["num_tokens"], seconds="seconds",
                    bound="bound",
                )  # fmt: skip
        return None

    def _load_context(self, _: str) -> Surface | None:
        shape = ["num_heads", "num_key_value_heads", "head_dim", "window_size"]
        rows = self._rows(
            "attention", "context_attention_perf", [*shape, "batch_size", "isl", "latency"], kv_cache_dtype="bfloat16"
        )
        if rows is None:
            return None
        rows["seconds"] = rows.latency / 1e3
        rows["bound"] = bounds.context_attention(
            self.machine,
            rows.batch_size,
            rows.isl,
            rows.num_heads,
            rows.num_key_value_heads,
            rows.head_dim,
            rows.window_size,
        )
        return build_surface(
            rows,
            features=shape,
            weights=[1.0, 1.0, 4.0, 0.5],
            axes=["batch_size", "isl"],
            seconds="seconds",
            bound="bound",
        )

    def _load_decode(self, cache: str) -> Surface | None:
        shape = ["num_heads", "num_key_value_heads", "head_dim", "window_size"]
        rows = self._rows(
            "attention", "generation_attention_perf", [*shape, "batch_size", "step", "latency"], kv_cache_dtype=cache
        )
        if rows is None:
            return None
        rows["context"] = rows.step + 1
        rows["seconds"] = rows.latency / 1e3
        rows["bound"] = bounds.decode_attention(
            self.machine, rows.batch_size, rows.context, rows.num_heads, rows.num_key_value_heads, rows.head_dim,
            1.0 if cache == "fp8" else 2.0, rows.window_size,
        )  # fmt: skip
        return build_surface(
            rows,
            features=shape,
            weights=[1.0, 1.0, 4.0, 0.5],
            axes=["batch_size", "context"],
            seconds="seconds",
            bound="bound",
        )

    def _load_mla(self, what: str) -> Surface | None:
        phase, _, cache = what.partition("/")
        file = "context_mla_perf" if phase == "context" else "generation_mla_perf"
        rows = self._rows(
            "mla", file, ["num_heads", "batch_size", "isl", "step", "latency"], stand_in="mla", kv_cache_dtype=cache
        )
        if rows is None:
            return None
        rows["length"] = rows.isl if phase == "context" else rows.step + 1
        rows["seconds"] = rows.latency / 1e3
        rows["bound"] = (
            bounds.mla_context(self.machine, rows.batch_size, rows.length, rows.num_heads)
            if phase == "context"
            else bounds.mla_decode(
                self.machine, rows.batch_size, rows.length, rows.num_heads, 1.0 if cache == "fp8" else 2.0
            )
        )
        return build_surface(
            rows, features=["num_heads"], weights=[1.0], axes=["batch_size", "length"], seconds="seconds", bound="bound"
        )

    def _load_allreduce(self, _: str) -> Surface | None:
        rows = self._rows(
            "comm",
            "custom_allreduce_perf",
            ["num_gpus", "message_size", "latency", "kernel_source"],
            allreduce_dtype="bfloat16",
        )
        if rows is None:
            return None
        rows = rows[~rows.kernel_source.str.contains("eager")]
        rows["seconds"] = rows.latency / 1e3
        rows["bound"] = bounds.all_reduce(self.machine, rows.num_gpus, 2.0 * rows.message_size)
        return build_surface(
            rows, features=["num_gpus"], weights=[0.7], axes=["message_size"], seconds="seconds", bound="bound"
        )


def source_for(machine: Machine, backend: str) -> Roofline:
    """The best source at hand: measured tables where installed and known for the machine, else the roofline."""
    root = tables_folder()
    if root is None or machine.tables is None or not (root / machine.tables).is_dir():
        return Roofline(machine)
    key = (machine.name, machine.domain, backend, str(root))
    if key not in _LOADED:
        _LOADED[key] = Tables(machine, backend, root)
    return _LOADED[key]


_LOADED: dict[tuple[str, int, str, str], Tables] = {}
"""Loading is most of a cold plan's time: once for each machine and backend."""
