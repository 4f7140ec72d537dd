"""Corrections learned from measured rows: small, immutable, with the error they showed on architectures they had not seen.

A correction is additive in log time: an offset for the backend and mode, slopes over load and lengths for each backend, and the
share of each kind of operator in the step, which is a correction factor for that kind to first order. The fit is a robust ridge
regression, so that few rows move it little. Intervals are conformal: quantiles of the residuals on held-out architectures, by mode
and backend where there are enough, and never narrower for having been fitted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from costmodel.measured import architecture
from costmodel.operators import BACKENDS, Kind, Layout
from costmodel.serving import Load, Steady
from hotpass.errors import InputError

Floats = NDArray[np.float64]

TARGETS = ("tpot", "ttft")
RIDGE = 100.0
"""Prior weight on no correction, in rows."""
SHARE_PRIOR = 3.0
"""How much closer to no correction the factors by kind of operator are held than the rest."""
ENOUGH = 60
"""Held-out rows of a mode and backend that an interval of its own needs."""
LEVEL = 0.90
DRAFTED = 2.5
"""Rows that leave their deployment open may have used drafts: published acceptance lengths are 2.0 to 3.4 tokens a step, so the low
end of their interval is divided by this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """One fit; equal content has equal `version`."""

    target: str
    """`tpot` or `ttft`."""
    names: tuple[str, ...]
    """Of the features."""
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    slopes: tuple[float, ...]
    """Of log time, one for each feature; the first is the offset."""
    intervals: Mapping[str, tuple[float, float]]
    """`mode/backend`, and `` for any → quantiles of the held-out log residual."""
    num_rows: int
    architectures: tuple[str, ...]
    held_out_error: float
    """Median absolute relative error on architectures left out of the fit; nan with a single one."""

    @property
    def version(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def factor(self, features: pd.DataFrame) -> Floats:
        """Measured over predicted, expected."""
        return np.asarray(
            np.exp(_design(features, self.names, np.array(self.centre), np.array(self.scale)) @ np.array(self.slopes))
        )

    def interval(self, group: str) -> tuple[float, float]:
        """Factors below and above a calibrated prediction that hold 90 %."""
        low, high = self.intervals.get(group, self.intervals[""])
        return float(np.exp(low)), float(np.exp(high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """Both targets."""

    tpot: Calibration
    ttft: Calibration

    @property
    def version(self) -> str:
        return hashlib.sha256(f"{self.tpot.version}{self.ttft.version}".encode()).hexdigest()[:8]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Corrections:
        """Raises InputError for a torn file."""
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            return Corrections(**{target: _from_plain(plain[target]) for target in TARGETS})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError("calibration", path, f"cannot be read ({error})", "fit it again") from None


def _from_plain(plain: Mapping[str, Any]) -> Calibration:
    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    lists["intervals"] = {key: tuple(value) for key, value in plain["intervals"].items()}
    return Calibration(**lists)


def fit_corrections(rows: pd.DataFrame, predicted: pd.DataFrame) -> Corrections:
    """From measured rows and what is predicted for them (`costmodel.measured.predict_rows`); refused rows are left out."""
    answered = predicted["refused"] == ""
    return Corrections(**{target: fit(rows[answered], predicted[answered], target) for target in TARGETS})


def corrected(
    steady: Steady, layout: Layout, load: Load, concurrency: Floats, backend: str, corrections: Corrections
) -> Steady:
    """A steady state with both times corrected, and the rate that follows."""
    size = len(concurrency)
    rows = pd.DataFrame({"mode": ["agg"] * size, "backend": [backend] * size})
    parts = {"decode": steady.decode.by_kind(), "prefill": steady.prefill.by_kind()}
    predicted = pd.DataFrame(
        {f"{phase}_{kind}_ms": s * 1e3 for phase, done in parts.items() for kind, s in done.items()}
    )
    predicted["waiting"] = np.maximum(concurrency / layout.dp, 1.0)
    predicted["tpot_ms"], predicted["ttft_ms"] = steady.tpot_s * 1e3, steady.ttft_s * 1e3
    tpot = steady.tpot_s * corrections.tpot.factor(features_of(rows, predicted, "tpot"))
    ttft = steady.ttft_s * corrections.ttft.factor(features_of(rows, predicted, "ttft"))
    cycle = ttft + max(load.output_tokens - 1.0, 0.0) * tpot
    return replace(steady, tpot_s=tpot, ttft_s=ttft, requests_per_s=concurrency / cycle)


def features_of(rows: pd.DataFrame, predicted: pd.DataFrame, target: str) -> pd.DataFrame:
    """What a correction may depend on: of the question and of the prediction, nothing of the measurement."""
    phase, host_ms = ("decode", 2.0) if target == "tpot" else ("prefill", 100.0)
    step = sum(predicted[f"{phase}_{kind}_ms"] for kind in Kind)
    prompt = sum(predicted[f"prefill_{kind}_ms"] for kind in Kind)
    whole = predicted[f"{target}_ms"]
    made = pd.DataFrame({"apart": (rows["mode"] == "disagg").astype(float)})
    for kind in list(Kind)[1:]:
        made[f"share:{kind}"] = predicted[f"{phase}_{kind}_ms"] / step
    additive = {
        "host": np.log1p(host_ms / whole),
        "burst": np.log1p((predicted["waiting"] - 1.0) * prompt / whole),
        "clients": np.log(predicted["waiting"]),
    }
    for backend in BACKENDS:
        own = rows["backend"] == backend
        made[f"backend:{backend}"] = own.astype(float)
        for name, values in additive.items():
            made[f"{name}:{backend}"] = values.where(own, 0.0)
    return made


def _design(features: pd.DataFrame, names: tuple[str, ...], centre: Floats, scale: Floats) -> Floats:
    values = features.reindex(columns=list(names[1:]), fill_value=0.0).to_numpy(float)
    # Beyond what was fitted a correction stays what it was at the edge.
    return np.hstack([np.ones((len(values), 1)), np.clip((values - centre) / scale, -3.0, 3.0)])


@dataclass(frozen=True, slots=True)
class _Data:
    """Rows ready to fit."""

    features: pd.DataFrame
    log_ratio: pd.Series
    """Measured over predicted."""
    kinds: pd.Series
    """Architecture."""
    groups: pd.Series
    """`mode/backend`."""
    told: pd.Series
    """Rows that say all about their deployment; the others are scored, never learned from, where there are enough."""

    @staticmethod
    def of(rows: pd.DataFrame, predicted: pd.DataFrame, target: str) -> _Data:
        return _Data(
            features=features_of(rows, predicted, target),
            log_ratio=pd.Series(np.log(rows[f"silicon_{target}_ms"] / predicted[f"{target}_ms"]), index=rows.index),
            kinds=rows["model_path"].map(architecture),
            groups=rows["mode"] + "/" + rows["backend"],
            told=predicted["open"] == 0,
        )

    def where(self, chosen: pd.Series) -> _Data:
        return _Data(
            self.features[chosen], self.log_ratio[chosen], self.kinds[chosen], self.groups[chosen], self.told[chosen]
        )


@dataclass(frozen=True, slots=True)
class _Slopes:
    names: tuple[str, ...]
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    values: tuple[float, ...]

    def log_factor(self, features: pd.DataFrame) -> Floats:
        return np.asarray(
            _design(features, self.names, np.array(self.centre), np.array(self.scale)) @ np.array(self.values)
        )


NOTHING = _Slopes(("offset",), (), (), (0.0,))
"""No correction."""


def fit(rows: pd.DataFrame, predicted: pd.DataFrame, target: str) -> Calibration:
    """Fit one target on rows that were answered. A correction that does not beat none on architectures it has not seen is not kept;
    the intervals are calibrated all the same. Raises InputError when there are no rows."""
    if not len(rows):
        raise InputError("measured rows", 0, "are too few to fit", "measure some")
    return _fit(_Data.of(rows, predicted, target), target)


def _fit(data: _Data, target: str) -> Calibration:
    if data.told.any():
        data = data.where(data.told)
    held = _held_out(data)
    corrected, plain = _error(held), _error(data.log_ratio)
    keep = bool(corrected < plain) if held.notna().any() else True
    slopes = _slopes(data) if keep else NOTHING
    residual = (held if keep else data.log_ratio).dropna()
    return Calibration(
        target=target, names=slopes.names, centre=slopes.centre, scale=slopes.scale, slopes=slopes.values,
        intervals=_quantiles(data, residual), num_rows=len(data.kinds), architectures=tuple(sorted(data.kinds.unique())),
        held_out_error=corrected if keep else plain,
    )  # fmt: skip


def _error(residual: pd.Series) -> float:
    """Median absolute relative error of a log residual."""
    return float(np.abs(np.expm1(-residual.dropna())).median())


def _slopes(data: _Data) -> _Slopes:
    """Robust ridge (Huber's weights, iterated); architectures count by the root of their rows."""
    features = data.features.loc[:, data.features.std() > 1e-9]
    centre = features.mean().to_numpy(float)
    held = np.array([name.startswith("share:") for name in features.columns])
    scale = features.std().to_numpy(float) * np.where(held, SHARE_PRIOR, 1.0)
    names = ("offset", *features.columns)
    x, y = _design(features, names, centre, scale), data.log_ratio.to_numpy(float)
    balance = 1.0 / np.sqrt(data.kinds.map(data.kinds.value_counts()).to_numpy(float))
    balance *= len(y) / balance.sum()
    weight, slopes = balance.copy(), np.zeros(x.shape[1])
    prior = RIDGE * np.eye(x.shape[1])
    prior[0, 0] = 1e-6
    for _ in range(12):
        slopes = np.linalg.solve(x.T @ (weight[:, None] * x) + prior, x.T @ (weight * y))
        residual = np.abs(y - x @ slopes)
        limit = 1.345 * max(float(np.median(residual)) / 0.6745, 1e-3)
        weight = balance * np.minimum(1.0, limit / np.maximum(residual, 1e-12))
    return _Slopes(names, tuple(centre.tolist()), tuple(scale.tolist()), tuple(slopes.tolist()))


def _held_out(data: _Data) -> pd.Series:
    """Log residual of every row under a fit without its architecture; nan with a single architecture."""
    residual = pd.Series(np.nan, index=data.kinds.index)
    if data.kinds.nunique() < 2:
        return residual
    for kind in data.kinds.unique():
        inside = data.kinds == kind
        slopes = _slopes(data.where(~inside))
        residual[inside] = data.log_ratio[inside] - slopes.log_factor(data.features[inside])
    return residual


def _quantiles(data: _Data, residual: pd.Series) -> dict[str, tuple[float, float]]:
    """Conformal quantiles (Vovk et al. 2005) in which every architecture counts alike: the next one is another architecture, not
    another row. Without any held-out residual, a factor of e either way."""
    if not len(residual):
        return {"": (-1.0, 1.0)}
    found = {"": _ends(residual, data.kinds)}
    for name, values in residual.groupby(data.groups.reindex(residual.index)):
        if len(values) >= ENOUGH and data.kinds.reindex(values.index).nunique() >= 3:
            found[str(name)] = _ends(values, data.kinds)
    return found


def _ends(residual: pd.Series, kinds: pd.Series) -> tuple[float, float]:
    own = kinds.reindex(residual.index)
    weight = (1.0 / own.map(own.value_counts())).to_numpy(float)
    order = np.argsort(residual.to_numpy(float), kind="stable")
    ranked, share = residual.to_numpy(float)[order], np.cumsum(weight[order]) / weight.sum()
    # One more architecture than seen: its weight lies beyond either end.
    tail = (1.0 - LEVEL) / 2 * own.nunique() / (own.nunique() + 1)
    low = int(np.searchsorted(share, tail, side="right"))
    high = int(np.searchsorted(share, 1.0 - tail, side="left"))
    return float(ranked[min(low, len(ranked) - 1)]), float(ranked[min(high, len(ranked) - 1)])


def leave_one_out(rows: pd.DataFrame, predicted: pd.DataFrame, target: str) -> pd.DataFrame:
    """Every row's prediction by a calibration that never saw its architecture: `value`, `low`, `high` in ms."""
    data = _Data.of(rows, predicted, target)
    made = pd.DataFrame(np.nan, index=rows.index, columns=["value", "low", "high"])
    for kind in data.kinds.unique():
        inside = data.kinds == kind
        fitted = _fit(data.where(~inside), target)
        values = predicted.loc[inside, f"{target}_ms"] * fitted.factor(data.features[inside])
        below, above = np.array([fitted.interval(group) for group in data.groups[inside]]).T
        below = np.where(data.told[inside], below, below / DRAFTED)
        made.loc[inside, "value"], made.loc[inside, "low"], made.loc[inside, "high"] = (
            values,
            values * below,
            values * above,
        )
    return made
