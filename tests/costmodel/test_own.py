"""Kernels that hotpass timed itself: exact on their points, one machine's only, and refused when torn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.graph import ModelGraph, graph_of
from costmodel.operators import Kind, Layout, Provenance, Roofline, step
from costmodel.operators.own import OwnTables
from costmodel.plans import with_formats
from costmodel.ranking import plan
from costmodel.records import Asked
from costmodel.serving import Load
from hotpass.errors import InputError

NUMBERS = ("m", "n", "k", "batch", "tokens", "heads", "kv_heads", "head_dim", "topk", "num_experts")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in ("op", "dtype", "seconds")}
    columns |= {name: [row.get(name, 0) for row in rows] for name in NUMBERS}
    facts = {"schema_version": "1", "name": "cpu:by hand", "memory_bytes": 32e9}
    pq.write_table(pa.table(columns).replace_schema_metadata({"hotpass": json.dumps(facts)}), path)
    return path


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A machine of 10 GB/s and 100 GFLOP/s: products take the longer of the two, copies their bytes."""
    rows: list[dict[str, Any]] = []
    for m, (n, k) in itertools.product((1, 16, 256), ((1024, 1024), (4096, 4096), (14336, 4096))):
        rows.append(
            {
                "op": "gemm",
                "dtype": "bf16",
                "m": m,
                "n": n,
                "k": k,
                "seconds": max(2 * n * k / 10e9, 2 * m * n * k / 100e9),
            }
        )
    rows += [{"op": "stream", "dtype": "fp32", "n": size, "seconds": size / 10e9} for size in (4096, 1 << 20, 1 << 28)]
    for batch, tokens in itertools.product((1, 8), (64, 1024)):
        moved = 2 * batch * tokens * 8 * 128 * 4
        rows.append(
            {
                "op": "decode", "dtype": "fp32", "batch": batch, "tokens": tokens, "heads": 32, "kv_heads": 8, "head_dim": 128,
                "seconds": 2 * moved / 10e9,
            }
        )  # fmt: skip
    return write(tmp_path / "kernels.parquet", rows)


def one(value: float) -> np.ndarray:
    return np.array([float(value)])


def test_the_machine_is_what_its_rows_reached(kernels: Path) -> None:
    machine = OwnTables.read(kernels).machine
    assert machine.name == "cpu:by hand"
    assert machine.memory_bytes_per_s == pytest.approx(10e9)
    assert machine.flops["bf16"] == pytest.approx(100e9)
    assert (machine.num_devices, machine.domain) == (1, 1)


def test_timed_points_come_back(kernels: Path) -> None:
    source = OwnTables.read(kernels)
    found = source.gemm("bf16", one(16), one(4096), one(4096))
    assert found.seconds[0] == pytest.approx(2 * 16 * 4096**2 / 100e9, rel=1e-6)
    assert found.provenance[0] == Provenance.MEASURED
    assert source.stream(one(1 << 20)).seconds[0] == pytest.approx((1 << 20) / 10e9, rel=1e-6)
    attention = source.decode_attention(one(8), one(1024), one(32), one(8), 128, 0, 4.0)
    assert attention.seconds[0] == pytest.approx(2 * 2 * 8 * 1024 * 8 * 128 * 4 / 10e9, rel=1e-6)


def test_what_was_not_timed_goes_by_the_roofline(kernels: Path) -> None:
    source = OwnTables.read(kernels)
    assert source.gemm("fp8", one(1), one(1024), one(1024)).provenance[0] == Provenance.ROOFLINE
    assert source.all_reduce(one(2), one(1024)).provenance[0] == Provenance.ROOFLINE


def test_plans_come_from_ones_own_kernels(kernels: Path, dense: ModelGraph) -> None:
    source = OwnTables.read(kernels)
    asked = Asked(kernels=source, concurrency=1, simulate=False)
    result = plan(dense, source.machine, Load(input_tokens=64, output_tokens=16), asked)
    assert result.source == "own kernels of cpu:by hand"
    assert [made.layout["tp"] for made in result.plans] == [1]
    # 16 GB of weights at 10 GB/s.
    assert result.plans[0].tpot_ms.value == pytest.approx(dense.active_params * 2 / 10e9 * 1e3, rel=0.1)


def test_torn_and_foreign_files_are_refused(kernels: Path, tmp_path: Path) -> None:
    kernels.write_bytes(kernels.read_bytes()[:300])
    with pytest.raises(InputError, match="cannot be read"):
        OwnTables.read(kernels)
    other = write(tmp_path / "other.parquet", [{"op": "stream", "dtype": "fp32", "n": 1, "seconds": 1.0}])
    with pytest.raises(InputError, match="no matrix product"):
        OwnTables.read(other)


def test_latent_attention_is_expanded_as_the_timed_engine_does(kernels: Path) -> None:
    """Transformers' own modules write out keys and values of every head for the whole context, each step; serving engines do not."""
    latent = graph_of(
        {
            "model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
            "intermediate_size": 1024, "vocab_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 128, "first_k_dense_replace": 2, "max_position_embeddings": 4096,
        },
        "latent",
    )  # fmt: skip
    layout = Layout(
        **{name: np.array([1]) for name in ("tp", "dp", "pp", "moe_tp", "ep", "dcp")}, all_to_all=np.array([False])
    )

    def again(source: Roofline, past: float) -> float:
        made = step(latent, layout, source, decode=True, sequences=one(8), tokens=one(1), past=one(past))
        return sum(float(o.seconds[0]) for o in made.operators if o.name.endswith("/kv_up_cached"))

    own = OwnTables.read(kernels)
    # 8 x 1024 cached latents of 128 through a matrix of 8 x (64 + 64) columns, in two layers, at 100 GFLOP/s.
    assert again(own, 1024.0) == pytest.approx(2 * 2 * 8 * 1024 * 128 * 1024 / 100e9, rel=0.2)
    assert again(own, 0.0) == 0.0
    assert again(Roofline(own.machine), 1024.0) == 0.0


def test_activations_beside_fp32_weights_have_four_bytes(kernels: Path, dense: ModelGraph) -> None:
    layout = Layout(
        **{name: np.array([1]) for name in ("tp", "dp", "pp", "moe_tp", "ep", "dcp")}, all_to_all=np.array([False])
    )
    source = Roofline(OwnTables.read(kernels).machine)
    wide, narrow = (
        step(graph, layout, source, decode=False, sequences=one(1), tokens=one(512), past=one(0)).by_kind()[
            Kind.ELEMENTWISE
        ]
        for graph in (with_formats(dense, "fp32"), dense)
    )
    assert wide[0] == pytest.approx(2 * narrow[0])
