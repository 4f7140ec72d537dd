"""Corrections learned from measured rows: small, immutable, with the error they showed on architectures they had not seen.

A time is a sum of parts (kinds of operators, what others' prompts add, queues, the host), and a correction is a factor for each
part, common to all and refined for each backend: measured ≈ sum over parts of exp(common + backend's) x part. The logarithms of the
factors are held to their priors and fitted robustly (`costmodel.additive`), so that few rows move them little and a correction
means the same for a step of any model. What the factors leave of TTFT is corrected by mode and backend, and by a backend's format
(`costmodel.cells`). A correction is kept only when it did better than less of it on architectures left out. Intervals are conformal: quantiles of the residuals on held-out architectures, by mode and
backend where there are enough, and never narrower for having been fitted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from costmodel.additive import Factors, Prior, fit_factors
from costmodel.cells import fit_cells, log_correction
from costmodel.measured import architecture
from costmodel.operators import Kind
from costmodel.serving import CHUNK_TOKENS, Load, Steady
from hotpass.errors import InputError

Floats = NDArray[np.float64]

TARGETS = ("tpot", "ttft")
PRIORS: Mapping[str, Mapping[str, Prior]] = {
    "tpot": {
        **{f"decode_{kind}_ms": Prior(0.0, 0.25) for kind in Kind},
        "interference_ms": Prior(0.0, 0.3),
        "host_ms": Prior(-1.5, 1.0),
    },
    "ttft": {
        "prefill_ms": Prior(0.0, 0.3),
        "beside_ms": Prior(0.0, 1.0),
        "queue_ms": Prior(0.0, 0.5),
        "held_ms": Prior(0.0, 0.5),
        "burst_ms": Prior(0.0, 0.7),
        "starting_ms": Prior(1.0, 1.0),
    },
}
"""Target → part of it → mean and standard deviation of the logarithm of its factor, before anything is measured."""
CELLED = ("ttft",)
"""Targets whose rest is corrected by cells: of TPOT, architectures left out have nothing in common by cells."""
CALLED = {"nvfp4": "fp4", "fp8_block": "fp8"}
"""Weight format → what rows call its precision, where that is another name."""
HOST_MS = 1.0
"""Unit of a step's host work, which no kernel accounts for."""
START_MS = 0.01
"""Unit of what the host takes for an operator of a prompt: unlike decode's, prompts' kernels are rarely captured as a graph, and each
of our operators is one to three of them."""
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
    factors: Factors | None
    """Of the parts; None: they did not help on architectures that they had not seen."""
    cells: Mapping[str, float]
    """Cell → what is added to log time beside the factors; empty: they did not help."""
    intervals: Mapping[str, tuple[float, float]]
    """`mode/backend`, and `` for any → quantiles of the held-out log residual."""
    num_rows: int
    architectures: tuple[str, ...]
    held_out_error: float
    """Median absolute relative error on architectures left out of the fit; nan with a single one."""

    @property
    def version(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def value_ms(self, parts: pd.DataFrame, backends: pd.Series, cells: pd.DataFrame, plain_ms: Floats) -> Floats:
        """What is expected to be measured, of the parts (`parts_of`), the cells (`cells_of`) and the prediction without a correction."""
        if self.factors is None:
            return np.asarray(plain_ms, np.float64)
        return _corrected(self.factors, self.cells, parts, backends, cells)

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
    made = dict(plain)
    made["architectures"] = tuple(plain["architectures"])
    made["intervals"] = {key: (float(low), float(high)) for key, (low, high) in plain["intervals"].items()}
    made["cells"] = {key: float(value) for key, value in plain["cells"].items()}
    made["factors"] = None if plain["factors"] is None else Factors.from_plain(plain["factors"])
    return Calibration(**made)


def fit_corrections(rows: pd.DataFrame, predicted: pd.DataFrame) -> Corrections:
    """From measured rows and what is predicted for them (`costmodel.measured.predict_rows`); refused rows are left out."""
    answered = predicted["refused"] == ""
    return Corrections(**{target: fit(rows[answered], predicted[answered], target) for target in TARGETS})


def corrected(
    steady: Steady, load: Load, concurrency: Floats, backend: str, precision: str | None, corrections: Corrections
) -> Steady:
    """A steady state with both times corrected, and the rate that follows."""
    kinds = {"decode": steady.decode.by_kind(), "prefill": steady.prefill.by_kind()}
    predicted = pd.DataFrame(
        {f"{phase}_{kind}_ms": s * 1e3 for phase, done in kinds.items() for kind, s in done.items()}
    )
    for name in ("interference", "beside", "queue"):
        predicted[f"{name}_ms"] = getattr(steady.loop, f"{name}_s") * 1e3
    predicted["held_ms"] = predicted["burst_ms"] = 0.0
    predicted["prefill_calls"] = steady.prefill.calls * max(
        np.ceil(load.input_tokens * (1.0 - load.cached_share) / CHUNK_TOKENS), 1.0
    )
    cells = cells_of(
        predicted.assign(mode="agg", backend=backend, precision=CALLED.get(precision or "", precision or ""))
    )
    backends = pd.Series(backend, index=predicted.index)
    tpot, ttft = (
        getattr(corrections, target).value_ms(parts_of(predicted, target), backends, cells, plain * 1e3) / 1e3
        for target, plain in (("tpot", steady.tpot_s), ("ttft", steady.ttft_s))
    )
    cycle = ttft + max(load.output_tokens - 1.0, 0.0) * tpot
    return replace(steady, tpot_s=tpot, ttft_s=ttft, requests_per_s=concurrency / cycle)


def parts_of(predicted: pd.DataFrame, target: str) -> pd.DataFrame:
    """The parts of a target, ms: of the prediction, nothing of the measurement."""
    made = predicted.assign(
        host_ms=HOST_MS, starting_ms=START_MS * predicted["prefill_calls"],
        prefill_ms=sum(predicted[f"prefill_{kind}_ms"] for kind in Kind),
    )  # fmt: skip
    return made[list(PRIORS[target])]


def cells_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Names of the cells that rows with a mode, a backend and perhaps a precision are in."""
    precision = rows["precision"].fillna("-") if "precision" in rows else "-"
    return pd.DataFrame({"mode": rows["mode"] + "/" + rows["backend"], "format": rows["backend"] + " " + precision})


def _corrected(
    factors: Factors, cells: Mapping[str, float], parts: pd.DataFrame, backends: pd.Series, names: pd.DataFrame
) -> Floats:
    total = factors.total(parts, backends)
    return np.asarray(total * np.exp(log_correction(cells, names)), np.float64) if cells else total


@dataclass(frozen=True, slots=True)
class _Data:
    """Rows ready to fit."""

    parts: pd.DataFrame
    plain_ms: pd.Series
    """Predicted, uncorrected."""
    measured_ms: pd.Series
    kinds: pd.Series
    """Architecture."""
    backends: pd.Series
    groups: pd.Series
    cells: pd.DataFrame
    told: pd.Series
    """Rows that say all about their deployment; the others are scored, never learned from, where there are enough."""

    @staticmethod
    def of(rows: pd.DataFrame, predicted: pd.DataFrame, target: str) -> _Data:
        return _Data(
            parts=parts_of(predicted, target),
            plain_ms=predicted[f"{target}_ms"],
            measured_ms=rows[f"silicon_{target}_ms"],
            kinds=rows["model_path"].map(architecture),
            backends=rows["backend"],
            groups=rows["mode"] + "/" + rows["backend"],
            cells=cells_of(rows),
            told=predicted["open"] == 0,
        )

    def where(self, chosen: pd.Series) -> _Data:
        return _Data(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @property
    def log_ratio(self) -> pd.Series:
        """Measured over predicted."""
        return pd.Series(np.log(self.measured_ms / self.plain_ms), index=self.kinds.index)


def fit(rows: pd.DataFrame, predicted: pd.DataFrame, target: str) -> Calibration:
    """Fit one target on rows that were answered. A correction that does not beat none on architectures it has not seen is not kept;
    the intervals are calibrated all the same. Raises InputError when there are no rows."""
    if not len(rows):
        raise InputError("measured rows", 0, "are too few to fit", "measure some")
    return _fit(_Data.of(rows, predicted, target), target)


def _fit(data: _Data, target: str) -> Calibration:
    if data.told.any():
        data = data.where(data.told)
    # From the least correction to the most: more is kept only when it did better on architectures left out.
    tried: list[tuple[pd.Series, Factors | None, dict[str, float]]] = [(data.log_ratio, None, {})]
    for celled in (False, True)[: 2 if target in CELLED else 1]:
        tried.append((_held_out(data, target, celled), *_learned(data, target, celled)))
    single = tried[1][0].isna().all()
    residual, factors, cells = tried[1] if single else min(tried, key=lambda one: _error(one[0]))
    return Calibration(
        target=target, factors=factors, cells=cells, intervals=_quantiles(data, residual.dropna()), num_rows=len(data.kinds),
        architectures=tuple(sorted(data.kinds.unique())), held_out_error=_error(residual),
    )  # fmt: skip


def _error(residual: pd.Series) -> float:
    """Median absolute relative error of a log residual."""
    return float(np.abs(np.expm1(-residual.dropna())).median())


def _learned(data: _Data, target: str, celled: bool) -> tuple[Factors, dict[str, float]]:
    """Architectures count by the root of their rows: the tenth row of one says less than the first of another."""
    balance = 1.0 / np.sqrt(data.kinds.map(data.kinds.value_counts()).to_numpy(float))
    factors = fit_factors(data.parts, data.backends, data.measured_ms, PRIORS[target], weights=balance)
    if not celled:
        return factors, {}
    left = np.log(data.measured_ms.to_numpy(float) / factors.total(data.parts, data.backends))
    return factors, fit_cells(data.cells, left, data.kinds)


def _held_out(data: _Data, target: str, celled: bool) -> pd.Series:
    """Log residual of every row under a fit without its architecture; nan with a single architecture."""
    residual = pd.Series(np.nan, index=data.kinds.index)
    if data.kinds.nunique() < 2:
        return residual
    for kind in data.kinds.unique():
        inside = data.kinds == kind
        factors, cells = _learned(data.where(~inside), target, celled)
        held = data.where(inside)
        value = _corrected(factors, cells, held.parts, held.backends, held.cells)
        residual[inside] = np.log(held.measured_ms / value)
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
    # Two more architectures than seen, one beyond either end.
    tail = (1.0 - LEVEL) / 2 * own.nunique() / (own.nunique() + 2)
    low = int(np.searchsorted(share, tail, side="right"))
    high = int(np.searchsorted(share, 1.0 - tail, side="left"))
    return float(ranked[min(low, len(ranked) - 1)]), float(ranked[min(high, len(ranked) - 1)])


def leave_one_out(rows: pd.DataFrame, predicted: pd.DataFrame, target: str) -> pd.DataFrame:
    """Every row's prediction by a calibration that never saw its architecture: `value`, `low`, `high` in ms."""
    data = _Data.of(rows, predicted, target)
    made = pd.DataFrame(np.nan, index=rows.index, columns=["value", "low", "high"])
    for kind in data.kinds.unique():
        inside = data.kinds == kind
        fitted, held = _fit(data.where(~inside), target), data.where(inside)
        values = fitted.value_ms(held.parts, held.backends, held.cells, held.plain_ms.to_numpy(float))
        below, above = np.array([fitted.interval(group) for group in held.groups]).T
        below = np.where(held.told, below, below / DRAFTED)
        made.loc[inside, "value"] = values
        made.loc[inside, "low"], made.loc[inside, "high"] = values * below, values * above
    return made
