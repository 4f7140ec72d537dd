"""Operator times: the roofline by hand, tables between and beyond their points, backends apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from costmodel.graph import ModelGraph, graph_of
from costmodel.machine import Machine, parse_machine
from costmodel.operators import Kind, Layout, Provenance, Roofline, Tables, bounds, source_for, step
from costmodel.operators.surface import build_surface
from hotpass.errors import InputError


def one(value: float) -> np.ndarray:
    return np.array([float(value)])


def test_bounds_by_hand(machine: Machine) -> None:
    # One token streams the weight; 4,096 tokens are bound by arithmetic.
    assert bounds.gemm(machine, "bf16", 1, 4096, 4096)[()] == pytest.approx((2 * 4096**2 + 2 * 8192) / 2e12)
    assert bounds.gemm(machine, "bf16", 4096, 4096, 4096)[()] == pytest.approx(2 * 4096**3 / 5e14)
    assert bounds.gemm(machine, "fp8", 4096, 4096, 4096)[()] == pytest.approx(2 * 4096**3 / 1e15)
    assert bounds.all_reduce(machine, 8, 1e6)[()] == pytest.approx(2 * 7 / 8 * 1e6 / 4e11)
    assert bounds.all_reduce(machine, 16, 1e6)[()] == pytest.approx(2 * 15 / 16 * 1e6 / 5e10)
    # A window caps what decode reads.
    assert bounds.decode_attention(machine, 8, 9999, 32, 8, 128, 2.0, 128) == bounds.decode_attention(
        machine, 8, 128, 32, 8, 128, 2.0
    )


def test_experts_touched_grow_with_tokens_and_end(machine: Machine) -> None:
    few, many, all_ = (bounds.moe(machine, "bf16", t, 4096, 1024, 4, 64, 1, 1) for t in (1, 16, 200))
    weights = 3 * 4096 * 1024 * 2 / 2e12
    assert few == pytest.approx(4 * weights, rel=0.02)
    assert few < many < all_
    assert all_ == pytest.approx(64 * weights, rel=0.1)


def test_a_table_is_exact_on_its_points_and_smooth_between(machine: Machine, gemm_folder: Path) -> None:
    source = Tables(machine, "trtllm", gemm_folder)
    for m, n, k in ((16, 4096, 1024), (4096, 16384, 16384)):
        want = 3e-6 + bounds.gemm(machine, "bf16", m, n, k)[()] / 0.5
        found = source.gemm("bf16", one(m), one(n), one(k))
        assert found.seconds[0] == pytest.approx(want, rel=1e-6)
        assert found.provenance[0] == Provenance.MEASURED
    between = source.gemm("bf16", one(64), one(2048), one(8192)).seconds[0]
    assert between == pytest.approx(3e-6 + bounds.gemm(machine, "bf16", 64, 2048, 8192)[()] / 0.5, rel=0.15)
    times = source.gemm("bf16", np.arange(1.0, 9000.0, 50), np.full(180, 4096.0), np.full(180, 4096.0)).seconds
    assert (np.diff(times) >= -1e-12).all()


def test_beyond_a_table_the_roofline_goes_on_and_says_so(machine: Machine, gemm_folder: Path) -> None:
    found = Tables(machine, "trtllm", gemm_folder).gemm("bf16", one(65536), one(16384), one(16384))
    assert found.provenance[0] == Provenance.EXTRAPOLATED
    assert found.seconds[0] == pytest.approx(bounds.gemm(machine, "bf16", 65536, 16384, 16384)[()] / 0.5, rel=0.05)


def test_backends_are_never_mixed(machine: Machine, gemm_folder: Path) -> None:
    query = one(16), one(4096), one(4096)
    fast, slow = (Tables(machine, b, gemm_folder).gemm("bf16", *query).seconds[0] for b in ("trtllm", "sglang"))
    assert slow == pytest.approx(2 * fast, rel=1e-6)
    # vLLM has no rows here: the roofline answers, and nobody else's kernels.
    vllm = Tables(machine, "vllm", gemm_folder).gemm("bf16", *query)
    assert vllm.provenance[0] == Provenance.ROOFLINE


def test_a_torn_table_is_one_sentence(machine: Machine, gemm_folder: Path) -> None:
    path = gemm_folder / "round" / "gemm" / "trtllm" / "1.0.0" / "gemm_perf.parquet"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match=r"gemm_perf\.parquet.*cannot be read"):
        Tables(machine, "trtllm", gemm_folder).gemm("bf16", one(1), one(1024), one(1024))


def test_holes_in_a_grid_are_filled_from_their_line() -> None:
    rows = pd.DataFrame({"f": [1, 1, 1, 2, 2], "x": [1, 4, 16, 1, 16], "s": [2.0, 2.0, 2.0, 4.0, 4.0], "b": 1.0})
    surface = build_surface(rows, features=["f"], weights=[1.0], axes=["x"], seconds="s", bound="b")
    ratio = surface.find(np.array([[2.0]]), one(4)).log_ratio
    assert np.exp(ratio[0]) * (surface.floor_seconds + 1.0) == pytest.approx(4.0)


def test_a_dense_decode_step_is_its_weights_and_cache(dense: ModelGraph, machine: Machine) -> None:
    made = step(dense, Layout.of(), Roofline(machine), decode=True, sequences=one(1), tokens=one(1), past=one(1023))
    weights = dense.active_params * 2 / 2e12 / Roofline.COMPUTE
    gemm = made.by_kind()[Kind.GEMM][0]
    launches = 2e-6 * (4 * 32 + 1)
    assert gemm == pytest.approx(weights + launches, rel=0.01)
    attention = made.by_kind()[Kind.ATTENTION][0]
    assert attention == pytest.approx(dense.kv_bytes(1024) / 2e12 / Roofline.COMPUTE + 32 * 4e-6, rel=0.01)
    assert made.by_kind()[Kind.COMMUNICATION][0] == 0.0
    assert sum(kind[0] for kind in made.by_kind().values()) == pytest.approx(made.seconds[0])


def test_tensor_parallel_divides_products_and_adds_reductions(dense: ModelGraph, machine: Machine) -> None:
    source = Roofline(machine)
    alone, shared = (
        step(dense, Layout.of(tp=tp), source, decode=False, sequences=one(1), tokens=one(4096), past=one(0))
        for tp in (1, 4)
    )
    ratio = alone.by_kind()[Kind.GEMM][0] / shared.by_kind()[Kind.GEMM][0]
    assert 3.5 < ratio < 4.0
    want = 64 * (5e-6 + 2 * 3 / 4 * 4096 * 4096 * 2 / 4e11 / Roofline.LINK)
    assert shared.by_kind()[Kind.COMMUNICATION][0] == pytest.approx(want)


def test_expert_data_parallel_exchanges_tokens(routed: ModelGraph, machine: Machine) -> None:
    layout = Layout.of(tp=1, dp=8, ep=8, all_to_all=True)
    made = step(routed, layout, Roofline(machine), decode=True, sequences=one(16), tokens=one(1), past=one(1000))
    names = {
        operator.name for operator in made.operators if operator.seconds[0] > 0 and operator.kind is Kind.COMMUNICATION
    }
    assert names == {"gqa+moe/dispatch", "gqa+moe/combine"}


def test_a_table_without_a_needed_column_is_one_sentence(machine: Machine, gemm_folder: Path) -> None:
    path = gemm_folder / "round" / "gemm" / "trtllm" / "1.0.0" / "gemm_perf.parquet"
    pd.read_parquet(path).drop(columns="k").to_parquet(path)
    with pytest.raises(InputError, match="has no column k"):
        Tables(machine, "trtllm", gemm_folder).gemm("bf16", one(1), one(1024), one(1024))


def test_older_tables_without_windows_mean_none(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "round" / "attention" / "trtllm" / "1.0.0"
    folder.mkdir(parents=True)
    batch, step = (a.ravel() for a in np.meshgrid([1, 8], [127, 1023], indexing="ij"))
    bound = bounds.decode_attention(machine, batch, step + 1, 32, 8, 128, 2.0)
    rows = pd.DataFrame({"batch_size": batch, "step": step, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128})
    rows.assign(latency=1e3 * 2 * bound, kv_cache_dtype="bfloat16").to_parquet(
        folder / "generation_attention_perf.parquet"
    )
    found = Tables(machine, "trtllm", tmp_path).decode_attention(one(8), one(1024), one(32), one(8), 128, 0, 2.0)
    assert found.provenance[0] == Provenance.MEASURED
    assert found.seconds[0] == pytest.approx(2 * bounds.decode_attention(machine, 8, 1024, 32, 8, 128, 2.0)[()])


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_published_tables_answer(installed_tables: Path, dense: ModelGraph, backend: str) -> None:
    source = source_for(parse_machine("h200"), backend)
    assert isinstance(source, Tables)
    made = step(dense, Layout.of(), source, decode=True, sequences=one(1), tokens=one(1), past=one(1024))
    # 15 GB of weights at 4.8 TB/s take 3.1 ms; published kernels stream at 0.6 to 0.95 of that.
    assert 3.2e-3 < made.seconds[0] < 6e-3
    assert made.worst()[0] == Provenance.MEASURED


def test_a_norm_across_heads_costs_ranks_one_more_reduction_a_layer(machine: Machine) -> None:
    config = {
        "model_type": "minimax_m2", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    source, layout = Roofline(machine), Layout.of(tp=4)
    seconds = {}
    for kind in ("per_layer", "per_head"):
        done = step(
            graph_of({**config, "qk_norm_type": kind}, kind), layout, source, decode=True, sequences=one(1), tokens=one(1), past=one(10)
        )  # fmt: skip
        seconds[kind] = done.by_kind()[Kind.COMMUNICATION][0]
    assert seconds["per_layer"] - seconds["per_head"] == pytest.approx(4 * source.hop, rel=0.01)


def test_a_collective_across_domains_is_longer_at_its_shortest(machine: Machine) -> None:
    source = Roofline(machine)
    for collective in (source.all_reduce, source.exchange):
        near, far = (collective(one(ranks), one(0)).seconds[0] for ranks in (machine.domain, 2 * machine.domain))
        assert (near, far) == (pytest.approx(5e-6), pytest.approx(25e-6))
