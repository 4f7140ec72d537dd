"""Timing kernels: medians, rotation beyond the cache, and rows that the cost model reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.operators.own import COLUMNS, OwnTables
from engines import microbench
from engines.microbench_ranks import SIZES, rank_counts, reductions
from hotpass.errors import InputError


def test_a_median_after_a_warm_run() -> None:
    ticks = iter([0.0, 10.0, 15.0, 20.0, 21.0, 30.0, 33.0, 99.0])
    turns: list[int] = []
    assert microbench.timed(turns.append, 1.0, clock=lambda: next(ticks)) == 3.0
    assert turns == [0, 1, 2, 3]


def test_copies_exceed_the_last_level_cache_three_times() -> None:
    mib = microbench.MIB
    assert microbench._copies(1 * mib, 32 * mib) == 96
    assert microbench._copies(100 * mib, 32 * mib) == 1
    assert microbench._copies(1024 * mib, 32 * mib) == 1


def test_every_shape_runs_and_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbench, "PRODUCTS", ((64, 64), (128, 64)))
    monkeypatch.setattr(microbench, "TOKENS", (1, 8))
    monkeypatch.setattr(microbench, "HEADS", ((4, 2, 16),))
    monkeypatch.setattr(microbench, "EXPERTS", ((32, 16, 2, 4),))
    monkeypatch.setattr(microbench, "EXPERT_TOKENS", (1, 8))
    rows = list(microbench.rows_of(0.0, llc_bytes=1 << 16))
    assert {row["op"] for row in rows} == {"gemm", "context", "decode", "experts", "stream", "layer", "step"}
    assert all(row["seconds"] > 0 for row in rows)
    path = tmp_path / "kernels.parquet"
    microbench.write(rows, path, threads=1)
    source = OwnTables.read(path)
    assert set(COLUMNS) <= set(source.rows.columns)
    assert len(source.rows) == len(rows)
    assert source.machine.name.startswith("cpu:")
    assert source.host_seconds is not None
    assert 0 < source.host_seconds[0] < 0.1


@pytest.mark.parametrize(
    ("out", "seconds", "says"), [("k.csv", 60.0, "no .parquet file"), ("k.parquet", 1.0, "not between 5 and 600")]
)
def test_bad_input_is_one_sentence(out: str, seconds: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        microbench.microbench(Path(out), seconds=seconds)


def test_ranks_are_powers_of_two_within_the_cores() -> None:
    assert [rank_counts(cores) for cores in (1, 2, 6, 64)] == [(), (2,), (2, 4), (2, 4, 8)]


def test_two_ranks_sum_in_step() -> None:
    rows = list(reductions(2, 0.2))
    assert [(row["op"], row["batch"], row["n"]) for row in rows] == [("allreduce", 2, size) for size in SIZES]
    assert all(row["seconds"] > 0 for row in rows)


def test_experts_come_from_layers_that_exceed_the_last_level_cache() -> None:
    layers = microbench._expert_layers(32, 16, 2, 4, llc_bytes=1 << 16)
    assert len(layers) == 8
    assert len({weight.data_ptr() for layer in layers for weight in layer.parameters()}) == 2 * len(layers)
