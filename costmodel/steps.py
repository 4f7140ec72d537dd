"""Steps of a model on one machine, predicted operator by operator and corrected by measured forward passes.

    shapes (phase, sequences, tokens, context, layers) ──► operators ──► parts by kind, ms ──► x factors learned ──► ms, 90 % interval

Measured passes say what a kind of operator really takes: one factor a kind, common to all, refined for each group (an engine's own
kernels, or those of a part), held to 1 until rows say otherwise. Two parts have no kernel behind them: what the host does once a step,
and once a layer. What no factor explains is smooth in a shape's logarithms and fades away from the shapes that were measured
(a Gaussian process), so that a shape measured again is predicted as it was. Intervals are conformal, from shapes left out. A fit is immutable; its version is the hash of its content.

Rows of different machines, versions or types are never mixed: `fit_steps` refuses them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from costmodel.additive import Factors, Prior, fit_factors
from costmodel.graph import ModelGraph
from costmodel.interval import Interval
from costmodel.operators import Kind, Layout, OperatorSource, step
from hotpass.errors import InputError

Floats = NDArray[np.float64]

SHAPE = ("phase", "num_seqs", "query_tokens", "context_mean", "layers")
"""Columns that say what a step does; `layers` is the depth that ran (0: the model's own)."""
HOST_SECONDS = (2e-5, 2e-5)
"""What the host takes for a layer and for a step where nobody timed it: a dozen calls into a framework, queued ahead of the device."""
PRIORS: Mapping[str, Prior] = {
    **{f"{kind}_ms": Prior(0.0, 0.3) for kind in Kind},
    "layer_host_ms": Prior(0.0, 0.7),
    "step_host_ms": Prior(0.0, 1.5),
}
GROUP_SHARE = 1.5
"""A part's kernels are others than the engine's own, so that they may differ by more than engines do."""
LEVEL = 0.90
FEW = 10
"""Left-out shapes below which an interval is as wide as `UNKNOWN` in either direction."""
UNKNOWN = 0.5
"""Of log time."""
REACH = 1.0
"""Doublings over which what the factors leave of one shape says something of another."""
REPEAT = 0.03
"""Standard deviation of the log time of one pass repeated in one session, at least."""


def parts_of_steps(
    graph: ModelGraph,
    source: OperatorSource,
    shapes: pd.DataFrame,
    *,
    kv_bytes: float = 2.0,
    host_seconds: tuple[float, float] | None = None,
) -> pd.DataFrame:
    """Predicted ms of each kind of operator, and of the host, for every row (columns `SHAPE`). `host_seconds`: of a layer and of a step,
    as timed on this machine; None: `HOST_SECONDS`. Raises InputError for a phase that has no step here."""
    layer_s, step_s = host_seconds or HOST_SECONDS
    made = pd.DataFrame(0.0, index=shapes.index, columns=list(PRIORS))
    for (phase, depth), rows in shapes.groupby(["phase", "layers"]):
        if phase not in ("decode", "prefill"):
            raise InputError("phase", phase, "is no step that the cost model knows", "use decode and prefill rows")
        share = int(str(depth)) / graph.num_layers if depth else 1.0
        seqs, tokens = (rows[name].to_numpy(float) for name in ("num_seqs", "query_tokens"))
        done = step(
            graph, _alone(len(rows)), source, decode=phase == "decode", sequences=seqs, tokens=tokens / seqs,
            past=rows["context_mean"].to_numpy(float), kv_bytes=kv_bytes,
        )  # fmt: skip
        for operator in done.operators:
            within = "/" in operator.name
            made.loc[rows.index, f"{operator.kind}_ms"] += operator.seconds * 1e3 * (share if within else 1.0)
        made.loc[rows.index, "layer_host_ms"] = layer_s * 1e3 * graph.num_layers * share
    made["step_host_ms"] = step_s * 1e3
    return made


def _alone(size: int) -> Layout:
    one = np.ones(size, np.int64)
    return Layout(tp=one, dp=one, pp=one, moe_tp=one, ep=one, dcp=one, all_to_all=np.zeros(size, np.bool_))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """What the factors leave of measured shapes."""

    points: tuple[tuple[float, ...], ...]
    """`_places` of each shape."""
    groups: tuple[str, ...]
    weights: tuple[float, ...]
    """Of the kernel at each point: the posterior mean is their weighted sum."""
    amplitude: float
    """Variance of the rest of a shape that was never measured."""

    def at(self, shapes: pd.DataFrame, group: str) -> Floats:
        """Log of the further factor."""
        own = np.array([name == group for name in self.groups], bool)
        if not own.any():
            return np.zeros(len(shapes))
        known = np.array(self.points)[own]
        return np.asarray(_kernel(_places(shapes), known, self.amplitude) @ np.array(self.weights)[own], np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFit:
    """Corrections of one machine and model type."""

    factors: Factors
    """By kind of operator, common and by group."""
    rest: Rest
    interval: tuple[float, float]
    """Quantiles of the log residual of shapes left out."""
    num_rows: int
    held_out_error: float
    """Median absolute relative error of shapes left out; nan with fewer than three."""
    environment: str
    """Fingerprint of what was measured; empty where rows have none."""

    @property
    def version(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def predict(self, parts: pd.DataFrame, shapes: pd.DataFrame, group: str) -> list[Interval]:
        """ms of each row (`parts` of `shapes`), with 90 % intervals."""
        values = _corrected(self.factors, self.rest, parts, shapes, group)
        low, high = np.exp(self.interval[0]), np.exp(self.interval[1])
        return [Interval(value=float(v), low=float(v * low), high=float(v * high)) for v in values]


def _corrected(factors: Factors, rest: Rest, parts: pd.DataFrame, shapes: pd.DataFrame, group: str) -> Floats:
    return factors.total(parts, pd.Series(group, index=parts.index)) * np.exp(rest.at(shapes, group))


def uncorrected(parts: pd.DataFrame) -> Floats:
    """ms before anything was learned: every part as its source has it."""
    return np.asarray(parts[list(PRIORS)].sum(axis=1), np.float64)


def fit_steps(parts: pd.DataFrame, rows: pd.DataFrame) -> StepFit:
    """`rows` beside `parts`: `ms` measured, `group`, columns `SHAPE`, and `environment` where known. Raises InputError for no rows, and
    for rows of more than one environment."""
    if not len(rows):
        raise InputError("measured passes", 0, "are too few to learn from", "measure some")
    environments = sorted(set(rows["environment"])) if "environment" in rows else [""]
    if len(environments) > 1:
        raise InputError(
            "measured passes",
            f"{len(environments)} environments",
            "cannot be learned from together",
            "choose the rows of one",
        )
    residual = _left_out(parts, rows)
    factors, rest = _learned(parts, rows)
    return StepFit(
        factors=factors, rest=rest, interval=_ends(residual), num_rows=len(rows),
        held_out_error=float(np.median(np.abs(np.expm1(-residual)))) if len(residual) >= 3 else float("nan"),
        environment=environments[0],
    )  # fmt: skip


def _learned(parts: pd.DataFrame, rows: pd.DataFrame) -> tuple[Factors, Rest]:
    factors = fit_factors(parts, rows["group"], rows["ms"], PRIORS, group_share=GROUP_SHARE)
    left = rows.assign(left=np.log(rows["ms"].to_numpy(float) / factors.total(parts, rows["group"])))
    shapes = left.groupby([*SHAPE, "group"], sort=True)["left"].agg(["median", "size"]).reset_index()
    values, places = shapes["median"].to_numpy(float), _places(shapes)
    amplitude = max(float(np.median(np.abs(values)) / 0.6745) ** 2, REPEAT**2)
    together = _kernel(places, places, amplitude) * (
        shapes["group"].to_numpy()[:, None] == shapes["group"].to_numpy()[None, :]
    )
    weights = np.linalg.solve(together + np.diag(REPEAT**2 / shapes["size"].to_numpy(float)), values)
    return factors, Rest(
        points=tuple(map(tuple, places.tolist())), groups=tuple(shapes["group"].astype(str)), weights=tuple(weights.tolist()),
        amplitude=amplitude,
    )  # fmt: skip


def _places(shapes: pd.DataFrame) -> Floats:
    """Shapes as points: decode and prefill far apart, the rest in doublings."""
    columns = [np.where(shapes["phase"] == "decode", 0.0, 100.0)]
    columns += [np.log2(shapes[name].to_numpy(float) + 1.0) for name in ("num_seqs", "query_tokens", "layers")]
    columns.append(np.log2(shapes["context_mean"].to_numpy(float) / 64.0 + 1.0))
    return np.stack(columns, axis=1)


def _kernel(first: Floats, second: Floats, amplitude: float) -> Floats:
    distance = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(amplitude * np.exp(-0.5 * distance / REACH**2), np.float64)


def _left_out(parts: pd.DataFrame, rows: pd.DataFrame) -> Floats:
    """Log residual of each shape of a group under a fit without that shape; empty with fewer than three shapes."""
    names = rows[[*SHAPE, "group"]].astype(str).agg("|".join, axis=1)
    if names.nunique() < 3:
        return np.zeros(0)
    found = []
    for name in names.unique():
        inside = names == name
        factors, rest = _learned(parts[~inside], rows[~inside])
        group = str(rows["group"][inside].iloc[0])
        predicted = _corrected(factors, rest, parts[inside], rows[inside], group)
        found.append(float(np.median(np.log(rows["ms"][inside].to_numpy(float) / predicted))))
    return np.array(found)


def _ends(residual: Floats) -> tuple[float, float]:
    """Conformal quantiles for one more shape; symmetric and wide where there are few."""
    size = np.sort(np.abs(residual))
    if len(size) < FEW:
        wide = max(UNKNOWN, float(size[-1]) if len(size) else 0.0)
        return -wide, wide
    rank = min(int(np.ceil(LEVEL * (len(size) + 1))), len(size))
    return -float(size[rank - 1]), float(size[rank - 1])
