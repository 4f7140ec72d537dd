"""A positive sum of parts fitted to measured times: time ≈ sum over parts j of exp(common_j + group's_j) x part_j.

The parts are predictions of one time's pieces; a factor of 1 for all of them leaves the prediction as it is. Logarithms of factors
have normal priors, groups' deviations have narrower ones, and the residual is of log time, under Huber's weights. The fit is
Gauss-Newton on a few dozen unknowns, so it takes milliseconds to a second. Not here: what the parts are, and intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GROUP_SHARE = 0.3
"""Standard deviation of a group's own deviation, in those of the common factor."""
ROW_WEIGHT = 0.3
"""Of a row's residual against the priors: rows of one source share its errors, so that ten of them say as much as three."""
HUBER = 1.345
"""In robust standard deviations (Huber 1964)."""
FLOOR = 0.03
"""Smallest standard deviation of a log residual that is believed."""
ITERATIONS = 10


class Prior(NamedTuple):
    """Of the logarithm of a factor."""

    mean: float
    deviation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """A fit."""

    parts: tuple[str, ...]
    common: tuple[float, ...]
    """Logarithm of each part's factor."""
    groups: Mapping[str, tuple[float, ...]]
    """Group → what is added to these logarithms; a group that was never seen has none."""

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Factors:
        groups = {str(name): tuple(map(float, values)) for name, values in plain["groups"].items()}
        return Factors(parts=tuple(plain["parts"]), common=tuple(map(float, plain["common"])), groups=groups)

    def of(self, group: str) -> dict[str, float]:
        """Part → factor in that group."""
        own = self.groups.get(group, (0.0,) * len(self.parts))
        return {name: float(np.exp(a + b)) for name, a, b in zip(self.parts, self.common, own, strict=True)}

    def total(self, parts: pd.DataFrame, groups: pd.Series) -> Floats:
        """Corrected times, in the parts' unit."""
        place, known = pd.factorize(groups.astype(str))
        zero = (0.0,) * len(self.parts)
        own = np.array([self.groups.get(str(name), zero) for name in known]).reshape(-1, len(self.parts))[place]
        scaled = parts[list(self.parts)].to_numpy(float) * np.exp(np.array(self.common) + own)
        return np.asarray(scaled.sum(axis=1), np.float64)


def fit_factors(
    parts: pd.DataFrame, groups: pd.Series, measured: pd.Series, priors: Mapping[str, Prior], *,
    group_share: float = GROUP_SHARE, weights: Floats | None = None,
) -> Factors:  # fmt: skip
    """Rows with a positive measured time each. `weights` are relative; without them all rows count alike. `group_share`: how far a
    group may be from what is common, in standard deviations of that."""
    names = list(priors)
    mean = np.array([priors[name].mean for name in names])
    deviation = np.array([priors[name].deviation for name in names])
    x = np.maximum(parts[names].to_numpy(float), 1e-12)
    y = np.log(measured.to_numpy(float))
    known, place = np.unique(groups.astype(str).to_numpy(), return_inverse=True)
    base = np.ones(len(y)) if weights is None else weights * (len(y) / weights.sum())
    size = len(names)
    precision = np.concatenate([deviation**-2.0, np.tile((group_share * deviation) ** -2.0, len(known))])
    origin = np.concatenate([mean, np.zeros(len(known) * size)])
    found = origin.copy()
    for _ in range(ITERATIONS):
        own = found[size:].reshape(len(known), size)
        scaled = x * np.exp(found[:size] + own[place])
        share = scaled / scaled.sum(axis=1, keepdims=True)
        residual = y - np.log(scaled.sum(axis=1))
        spread = max(float(np.median(np.abs(residual))) / 0.6745, FLOOR)
        weight = ROW_WEIGHT * base * np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual), 1e-12)) / spread**2
        found = found + _step(share, place, len(known), weight, residual, precision, found - origin)
    own = found[size:].reshape(len(known), size)
    return Factors(
        parts=tuple(names), common=tuple(found[:size].tolist()),
        groups={str(name): tuple(values) for name, values in zip(known, own.tolist(), strict=True)},
    )  # fmt: skip


def _step(
    share: Floats, place: NDArray[np.intp], num_groups: int, weight: Floats, residual: Floats, precision: Floats, away: Floats
) -> Floats:  # fmt: skip
    """One Gauss-Newton step of the common and the groups' logarithms; at most half a unit, so that it cannot run away."""
    size = share.shape[1]
    hessian, gradient = np.diag(precision), -precision * away
    for group in range(num_groups):
        inside = place == group
        own, all_ = slice(size * (1 + group), size * (2 + group)), slice(0, size)
        weighted = weight[inside, None] * share[inside]
        square, pull = share[inside].T @ weighted, weighted.T @ residual[inside]
        for rows in (all_, own):
            gradient[rows] += pull
            for columns in (all_, own):
                hessian[rows, columns] += square
    return np.clip(np.linalg.solve(hessian, gradient), -0.5, 0.5)
