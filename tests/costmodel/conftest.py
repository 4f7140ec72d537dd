"""Small models and machines, and kernel tables written by hand in the layout of the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from costmodel.graph import ModelGraph, graph_of
from costmodel.machine import Machine
from costmodel.operators.tables import tables_folder

DENSE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
MOE: dict[str, Any] = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1024,
}  # fmt: skip


@pytest.fixture
def dense() -> ModelGraph:
    return graph_of(DENSE, "dense-8b")


@pytest.fixture
def routed() -> ModelGraph:
    return graph_of(MOE, "moe")


@pytest.fixture
def machine() -> Machine:
    """Round numbers: 100 GB, 2 TB/s, 500 TFLOP/s, eight to a domain, 16 in all."""
    return Machine(
        name="round",
        memory_bytes=100e9,
        memory_bytes_per_s=2e12,
        flops={"bf16": 5e14, "fp8": 1e15},
        scale_up_bytes_per_s=4e11,
        domain=8,
        scale_out_bytes_per_s=5e10,
        num_devices=16,
        tables="round",
    )


@pytest.fixture
def gemm_folder(tmp_path: Path) -> Path:
    """GEMM rows of two backends: at 3 µs + the bound over 0.5 for `trtllm`, twice that for `sglang`."""
    m, n, k = (
        a.ravel() for a in np.meshgrid([1, 16, 256, 4096], [1024, 4096, 16384], [1024, 4096, 16384], indexing="ij")
    )
    bound = np.maximum(2.0 * m * n * k / 5e14, (2.0 * n * k + 2.0 * m * (n + k)) / 2e12)
    for backend, factor in (("trtllm", 1.0), ("sglang", 2.0)):
        folder = tmp_path / "round" / "gemm" / backend / "1.0.0"
        folder.mkdir(parents=True)
        rows = pd.DataFrame(
            {"m": m, "n": n, "k": k, "latency": factor * 1e3 * (3e-6 + bound / 0.5), "gemm_dtype": "bfloat16"}
        )
        rows.to_parquet(folder / "gemm_perf.parquet")
    return tmp_path


@pytest.fixture
def installed_tables() -> Path:
    """The published kernel tables, where the extra is installed."""
    folder = tables_folder()
    if folder is None:
        pytest.skip("kernel tables are not installed (extra nvidia-tables)")
    return folder
