"""A campaign's passes become factors by kind of operator, engine and part; what was simulated teaches nothing about kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cluster.cli import main
from cluster.learning import LEAST_PASSES, learn_passes
from costmodel.graph import graph_of
from costmodel.operators.own import OwnTables
from costmodel.steps import parts_of_steps
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, PartUse
from tests.cluster.campaigns import part
from tests.costmodel.conftest import DENSE
from tests.costmodel.test_own import write

FAST = Candidate(parts=(PartUse(source=part("fast-mlp", "mlp")),))
TUNED = Candidate(settings={"threads": 2})
KNOWN = {one.id: one for one in (AS_LOADED, FAST, TUNED)}


@pytest.fixture
def source(tmp_path: Path) -> OwnTables:
    rows = [
        {"op": "gemm", "dtype": "bf16", "m": m, "n": n, "k": n, "seconds": 2 * n * n / 10e9}
        for m in (1, 64)
        for n in (1024, 4096)
    ]
    rows += [{"op": "stream", "dtype": "fp32", "n": size, "seconds": size / 10e9} for size in (4096, 1 << 20)]
    rows += [{"op": "layer", "dtype": "fp32", "seconds": 2e-4}, {"op": "step", "dtype": "fp32", "seconds": 1e-4}]
    return OwnTables.read(write(tmp_path / "kernels.parquet", rows))


def passes_of(source: OwnTables, *, kind: str = "measured") -> pd.DataFrame:
    """As loaded at 1.3 times its parts, the candidate's part at 0.65 times; eight passes of each of twelve shapes."""
    shapes = pd.DataFrame(
        [
            {"phase": phase, "num_seqs": n, "query_tokens": n * tokens, "context_mean": context, "layers": 0}
            for phase, tokens in (("decode", 1), ("prefill", 32))
            for n in (1, 4)
            for context in (64, 256, 1024)
        ]
    )
    ms = parts_of_steps(graph_of(DENSE, "dense"), source, shapes, host_seconds=source.host_seconds).sum(axis=1)
    frames = []
    for side, factor in (("incumbent", 1.3), ("candidate", 0.65)):
        one = shapes.assign(
            side=side, candidate=FAST.id, incumbent=AS_LOADED.id, ms_per_step=ms * factor, environment="here", kind=kind
        )
        frames += [one] * LEAST_PASSES
    return pd.concat(frames, ignore_index=True)


def test_factors_by_kind_and_part(source: OwnTables) -> None:
    found = learn_passes(passes_of(source), KNOWN, graph_of(DENSE, "dense"), source, kv_bytes=2.0)
    assert found.groups == ("as loaded", "fast-mlp")
    assert found.num_passes == 2 * 12 * LEAST_PASSES
    assert found.zero_shot_error > 0.2
    assert found.fit.held_out_error < 0.05
    loaded, fast = (found.fit.factors.of(group)["gemm_ms"] for group in found.groups)
    assert fast / loaded == pytest.approx(0.5, rel=0.1)
    assert loaded == pytest.approx(1.3, rel=0.1)


def test_settings_and_simulations_teach_nothing(source: OwnTables) -> None:
    graph = graph_of(DENSE, "dense")
    with pytest.raises(InputError, match="too few"):
        learn_passes(passes_of(source, kind="simulated"), KNOWN, graph, source, kv_bytes=2.0)
    tuned = passes_of(source).replace({"candidate": {FAST.id: TUNED.id}})
    assert learn_passes(tuned, KNOWN, graph, source, kv_bytes=2.0).groups == ("as loaded",)
    assert np.isfinite(learn_passes(tuned, KNOWN, graph, source, kv_bytes=2.0).fit.held_out_error)


def test_a_folder_needs_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--validate", str(tmp_path)]) == 2
    assert "--kernels" in capsys.readouterr().err
