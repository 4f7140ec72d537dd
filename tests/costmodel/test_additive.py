"""Sums of parts: known factors are found again, few rows move little, and groups differ only as far as rows show it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from costmodel.additive import Factors, Prior, fit_factors

PRIORS = {"a": Prior(0.0, 0.5), "b": Prior(0.0, 0.5)}


def parts_of(count: int) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    return pd.DataFrame({"a": rng.uniform(1, 9, count), "b": rng.uniform(1, 9, count)})


def test_known_factors_are_found_again() -> None:
    parts = parts_of(400)
    groups = pd.Series(np.where(np.arange(400) % 2, "x", "y"))
    measured = 1.5 * parts["a"] + np.where(groups == "x", 0.7, 1.0) * parts["b"]
    found = fit_factors(parts, groups, measured, PRIORS)
    assert found.of("x") == {"a": pytest.approx(1.5, rel=0.03), "b": pytest.approx(0.7, rel=0.03)}
    assert found.of("y")["b"] == pytest.approx(1.0, rel=0.03)
    assert found.total(parts, groups) == pytest.approx(measured.to_numpy(), rel=0.03)


def test_few_rows_move_little_and_many_move_far() -> None:
    parts = parts_of(300)
    groups = pd.Series("x", index=parts.index)
    measured = 2.0 * parts.sum(axis=1) * np.exp(np.random.default_rng(1).normal(0, 0.3, 300))
    shifts = [
        float(np.mean(list(fit_factors(parts[:n], groups[:n], measured[:n], PRIORS).of("x").values())))
        for n in (1, 300)
    ]
    assert 1.0 < shifts[0] < 1.5 < shifts[1] < 2.05


def test_outliers_are_not_followed() -> None:
    parts = parts_of(100)
    groups = pd.Series("x", index=parts.index)
    measured = parts.sum(axis=1).where(parts.index >= 15, 50 * parts.sum(axis=1))
    factors = fit_factors(parts, groups, measured, PRIORS).of("x")
    assert all(factor == pytest.approx(1.0, abs=0.1) for factor in factors.values())


def test_an_unseen_group_gets_what_is_common() -> None:
    parts = parts_of(200)
    measured = 1.4 * parts.sum(axis=1)
    found = fit_factors(parts, pd.Series("x", index=parts.index), measured, PRIORS)
    assert 1.2 < found.of("never seen")["a"] <= found.of("x")["a"] + 1e-9
    plain = {
        "parts": list(found.parts),
        "common": list(found.common),
        "groups": {k: list(v) for k, v in found.groups.items()},
    }
    assert Factors.from_plain(plain) == found
