"""Steps by kind of operator, corrected by measured passes: factors by group are found, few rows stay wide, mixtures are refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from costmodel.graph import ModelGraph
from costmodel.machine import Machine
from costmodel.operators import Kind, Layout, Roofline, step
from costmodel.steps import PRIORS, fit_steps, parts_of_steps, uncorrected
from hotpass.errors import InputError


def shapes(count: int = 24) -> pd.DataFrame:
    rows = []
    for place in range(count):
        decode, size = place % 2 == 0, place // 2
        rows.append(
            {
                "phase": "decode" if decode else "prefill",
                "num_seqs": 2 ** (size % 4),
                "query_tokens": 2 ** (size % 4) * (1 if decode else 64 * (1 + size % 3)),
                "context_mean": 128 * (size % 5),
                "layers": 0,
            }
        )
    return pd.DataFrame(rows)


@pytest.fixture
def parts(dense: ModelGraph, machine: Machine) -> pd.DataFrame:
    return parts_of_steps(dense, Roofline(machine), shapes())


def rows_of(parts: pd.DataFrame, factors: dict[str, float], group: str = "decoder") -> pd.DataFrame:
    plain = {name: float(np.exp(prior.mean)) for name, prior in PRIORS.items()} | factors
    ms = sum(parts[name] * plain[name] for name in PRIORS)
    return shapes(len(parts)).assign(ms=ms, group=group, environment="here")


def test_parts_are_the_operators_of_the_step(parts: pd.DataFrame, dense: ModelGraph, machine: Machine) -> None:
    one = np.array([1.0])
    alone = step(dense, Layout.of(), Roofline(machine), decode=True, sequences=one, tokens=one, past=0 * one)
    for kind, seconds in alone.by_kind().items():
        assert parts.loc[0, f"{kind}_ms"] == pytest.approx(seconds[0] * 1e3)
    assert parts["layer_host_ms"].iloc[0] == pytest.approx(0.02 * 32)


def test_a_cut_has_its_share_of_the_layers_and_the_whole_head(dense: ModelGraph, machine: Machine) -> None:
    table = shapes(2).assign(layers=[8, 8])
    cut = parts_of_steps(dense, Roofline(machine), table)
    whole = parts_of_steps(dense, Roofline(machine), shapes(2))
    assert cut["attention_ms"].to_numpy() == pytest.approx(whole["attention_ms"].to_numpy() / 4)
    assert (cut["gemm_ms"] > whole["gemm_ms"] / 4).all()
    assert (uncorrected(cut) < uncorrected(whole)).all()


def test_what_kinds_really_take_is_learned(parts: pd.DataFrame) -> None:
    rows = rows_of(parts, {f"{Kind.GEMM}_ms": 1.6, "layer_host_ms": 4.0})
    fit = fit_steps(parts, rows)
    factors = fit.factors.of("decoder")
    assert factors[f"{Kind.GEMM}_ms"] == pytest.approx(1.6, rel=0.1)
    predicted = [span.value for span in fit.predict(parts, rows, "decoder")]
    assert predicted == pytest.approx(rows["ms"].to_numpy(), rel=0.03)
    assert fit.held_out_error < 0.05 < np.median(np.abs(uncorrected(parts) / rows["ms"] - 1))


def test_a_parts_own_kernels_are_a_group_of_their_own(parts: pd.DataFrame) -> None:
    both = pd.concat([parts, parts], ignore_index=True)
    rows = pd.concat([rows_of(parts, {}), rows_of(parts, {f"{Kind.GEMM}_ms": 0.5}, "fast-linear")], ignore_index=True)
    fit = fit_steps(both, rows)
    plain, fast = fit.factors.of("decoder"), fit.factors.of("fast-linear")
    assert fast[f"{Kind.GEMM}_ms"] / plain[f"{Kind.GEMM}_ms"] == pytest.approx(0.5, rel=0.15)
    assert fast[f"{Kind.ATTENTION}_ms"] / plain[f"{Kind.ATTENTION}_ms"] == pytest.approx(1.0, rel=0.15)


def test_few_shapes_are_wide_and_more_are_not(parts: pd.DataFrame) -> None:
    rows = rows_of(parts, {})
    few, many = fit_steps(parts[:4], rows[:4]), fit_steps(parts, rows)
    assert few.interval[1] >= 0.5 > 0.1 > many.interval[1]
    assert few.version != many.version == fit_steps(parts, rows).version


def test_what_cannot_be_learned_from_is_refused(parts: pd.DataFrame, dense: ModelGraph, machine: Machine) -> None:
    rows = rows_of(parts, {})
    with pytest.raises(InputError, match="2 environments"):
        fit_steps(parts, rows.assign(environment=["here", "there"] * 12))
    with pytest.raises(InputError, match="too few"):
        fit_steps(parts[:0], rows[:0])
    with pytest.raises(InputError, match="no step"):
        parts_of_steps(dense, Roofline(machine), shapes(2).assign(phase="forward"))


def test_a_shape_that_was_measured_is_predicted_as_it_was(parts: pd.DataFrame) -> None:
    rows = rows_of(parts, {})
    odd = rows.index[6]
    rows.loc[odd, "ms"] *= 1.3  # one shape that no factor explains
    repeated = pd.concat([rows] * 6, ignore_index=True)
    fit = fit_steps(pd.concat([parts] * 6, ignore_index=True), repeated)
    predicted = [span.value for span in fit.predict(parts, rows, "decoder")]
    assert predicted[6] == pytest.approx(rows.loc[odd, "ms"], rel=0.1)
    assert predicted[13] == pytest.approx(rows.loc[rows.index[13], "ms"], rel=0.05)
