"""Operator times from kernels that hotpass timed itself (`hotpass microbench`): a Parquet file with the machine's fingerprint.

The file is one machine, one engine, one set of versions; it answers for that machine only. Its peaks are the best that its own rows
reached, so that an inefficiency is relative to what the machine has shown. A CPU is one accelerator, so that sums over its cores'
processes, where the file has them, say only how a link of that speed behaves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from costmodel.machine import Machine
from costmodel.operators import bounds
from costmodel.operators.interpolated import Interpolated
from costmodel.operators.surface import Surface, build_surface
from hotpass.errors import InputError

COLUMNS = (
    "op",
    "dtype",
    "seconds",
    "m",
    "n",
    "k",
    "batch",
    "tokens",
    "heads",
    "kv_heads",
    "head_dim",
    "topk",
    "num_experts",
)
SCHEMA_VERSION = "1"


class OwnTables(Interpolated):
    """One file of timed kernels, those of transformers' own modules."""

    expands_latents = True

    def __init__(self, machine: Machine, rows: pd.DataFrame) -> None:
        super().__init__(machine)
        self.rows = rows
        self.name = f"own kernels of {machine.name}"

    @staticmethod
    def read(path: Path) -> OwnTables:
        """Raises InputError for a torn or foreign file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
            facts: dict[str, Any] = json.loads((table.schema.metadata or {})[b"hotpass"])
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise InputError("kernels", path, f"cannot be read ({error})", "run `hotpass microbench` again") from None
        missing = [name for name in COLUMNS if name not in table.column_names]
        if missing or facts.get("schema_version") != SCHEMA_VERSION:
            raise InputError("kernels", path, "is not a file of this version", "run `hotpass microbench` again")
        rows: pd.DataFrame = table.to_pandas()
        return OwnTables(_machine(facts, rows), rows)

    @property
    def host_seconds(self) -> tuple[float, float] | None:
        """What the host takes for a layer and for a step beside the kernels; None where the file has no such rows."""
        found = [self.rows.loc[self.rows["op"] == op, "seconds"] for op in ("layer", "step")]
        return None if any(part.empty for part in found) else (float(found[0].median()), float(found[1].median()))

    def _of(self, op: str, **equal: str) -> pd.DataFrame | None:
        chosen = self.rows["op"] == op
        for name, value in equal.items():
            chosen &= self.rows[name] == value
        return self.rows[chosen].copy() if chosen.any() else None

    def _load_gemm(self, fmt: str) -> Surface | None:
        rows = self._of("gemm", dtype=fmt)
        if rows is None:
            return None
        rows["bound"] = bounds.gemm(self.machine, fmt, rows.m, rows.n, rows.k)
        return build_surface(
            rows, features=["n", "k"], weights=[1.0, 1.0], axes=["m"], seconds="seconds", bound="bound"
        )

    def _load_moe(self, what: str) -> Surface | None:
        fmt = what.partition("/")[0]
        rows = self._of("experts", dtype=fmt)
        if rows is None:
            return None
        one = np.ones(len(rows))
        rows = rows.assign(tp=one, ep=one)
        rows["bound"] = bounds.moe(
            self.machine, fmt, rows.tokens, rows.n, rows.k, rows.topk, rows.num_experts, one, one
        )
        return build_surface(
            rows, features=["n", "k", "topk", "num_experts", "tp", "ep"], weights=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], axes=["tokens"],
            seconds="seconds", bound="bound",
        )  # fmt: skip

    def _load_context(self, _: str) -> Surface | None:
        rows = self._of("context")
        if rows is None:
            return None
        rows["window"] = 0
        rows["bound"] = bounds.context_attention(
            self.machine, rows.batch, rows.tokens, rows.heads, rows.kv_heads, rows.head_dim
        )
        return build_surface(
            rows, features=["heads", "kv_heads", "head_dim", "window"], weights=[1.0, 1.0, 1.0, 0.0], axes=["batch", "tokens"],
            seconds="seconds", bound="bound",
        )  # fmt: skip

    def _load_decode(self, _: str) -> Surface | None:
        rows = self._of("decode")
        if rows is None:
            return None
        rows["window"] = 0
        rows["bound"] = bounds.decode_attention(
            self.machine, rows.batch, rows.tokens, rows.heads, rows.kv_heads, rows.head_dim, 4.0
        )
        return build_surface(
            rows, features=["heads", "kv_heads", "head_dim", "window"], weights=[1.0, 1.0, 1.0, 0.0], axes=["batch", "tokens"],
            seconds="seconds", bound="bound",
        )  # fmt: skip

    def _load_allreduce(self, _: str) -> Surface | None:
        rows = self._of("allreduce")
        if rows is None:
            return None
        rows["elements"] = rows.n / 2
        rows["bound"] = bounds.all_reduce(self.machine, rows.batch, rows.n)
        return build_surface(
            rows, features=["batch"], weights=[1.0], axes=["elements"], seconds="seconds", bound="bound"
        )  # fmt: skip

    def _load_stream(self, _: str) -> Surface | None:
        rows = self._of("stream")
        if rows is None:
            return None
        rows["one"] = 1
        rows["bound"] = bounds.stream(self.machine, rows.n)
        return build_surface(rows, features=["one"], weights=[1.0], axes=["n"], seconds="seconds", bound="bound")


def _machine(facts: dict[str, Any], rows: pd.DataFrame) -> Machine:
    """The machine as its own rows show it: best rate of bytes, best rate of arithmetic of each type."""
    products = rows[rows["op"] == "gemm"]
    if not len(products):
        raise InputError(
            "kernels", facts.get("name", "file"), "holds no matrix product", "run `hotpass microbench` again"
        )
    width = products["dtype"].map({"fp32": 4.0, "bf16": 2.0})
    moved = ((products["n"] * products["k"]) * width / products["seconds"]).max()
    copies = rows[rows["op"] == "stream"]
    moved = max(float(moved), float((copies["n"] / copies["seconds"]).max()) if len(copies) else 0.0)
    rates = (2.0 * products["m"] * products["n"] * products["k"] / products["seconds"]).groupby(products["dtype"]).max()
    flops = {str(name): float(rate) for name, rate in rates.items()}
    flops.setdefault("bf16", max(flops.values()))
    return Machine(
        name=str(facts["name"]), memory_bytes=float(facts["memory_bytes"]), memory_bytes_per_s=moved, flops=flops,
        scale_up_bytes_per_s=moved, domain=1, scale_out_bytes_per_s=0.0, num_devices=1,
    )  # fmt: skip
