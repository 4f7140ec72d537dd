"""Measured efficiencies between their points: log-linear inside, the roofline outside.

A table's rows become curves: what changes the kernel (widths, heads, experts) names a curve, what changes with the load (tokens,
batch, context) are its one or two axes. What is interpolated is the logarithm of `time / (floor + bound)`, so that between points
the physics (the bound) does the work, and beyond the last point the roofline goes on at the last efficiency, marked extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NEIGHBOURS = 4
FAR = 1.0
"""Distance in doublings of a weighted feature beyond which a curve is no longer a neighbour but an extrapolation."""


class Found(NamedTuple):
    """One look-up for each query."""

    log_ratio: Floats
    extrapolated: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """Curves over one or two axes."""

    features: Floats
    """[curves, features], log2 of the features times their weights."""
    weights: Floats
    """[features]."""
    axes: tuple[Floats, Floats]
    """log2 of the axes' points; an axis of one point for curves over one axis."""
    log_ratio: Floats
    """[curves, axis 0, axis 1]."""
    floor_seconds: float
    """Shortest time of the table: what a launch costs."""

    def find(self, features: Floats, first: Floats, second: Floats | None = None) -> Found:
        """`features` [queries, features] and axis coordinates [queries], none of them in logarithms."""
        places = np.log2(features + 1.0) * self.weights
        # Sorting one number for each query is much faster than sorting rows; the weights keep unequal rows apart.
        _, chosen, back = np.unique(places @ np.exp(np.arange(places.shape[1])), return_index=True, return_inverse=True)
        wanted = places[chosen]
        distance = np.sqrt(((wanted[:, None, :] - self.features[None, :, :]) ** 2).sum(axis=2))
        near = np.argsort(distance, axis=1, kind="stable")[:, :NEIGHBOURS]
        gap = np.take_along_axis(distance, near, axis=1)
        share = 1.0 / (gap + 1e-9) ** 2
        share /= share.sum(axis=1, keepdims=True)
        curves = np.einsum("qk,qkab->qab", share, self.log_ratio[near])
        i, fi, out_i = _locate(self.axes[0], first)
        j, fj, out_j = _locate(self.axes[1], np.ones_like(first) if second is None else second)
        i1, j1 = np.minimum(i + 1, len(self.axes[0]) - 1), np.minimum(j + 1, len(self.axes[1]) - 1)
        value = (1 - fi) * ((1 - fj) * curves[back, i, j] + fj * curves[back, i, j1])
        value += fi * ((1 - fj) * curves[back, i1, j] + fj * curves[back, i1, j1])
        return Found(value, (gap[:, 0][back] > FAR) | out_i | out_j)


def _locate(axis: Floats, values: Floats) -> tuple[NDArray[np.intp], Floats, NDArray[np.bool_]]:
    """Cell, place within it (clamped to the axis), and whether the value lies beyond the axis by more than a doubling."""
    at = np.log2(np.maximum(values, 1e-9))
    if len(axis) == 1:
        return np.zeros(len(at), np.intp), np.zeros(len(at)), np.zeros(len(at), np.bool_)
    cell = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
    place = np.clip((at - axis[cell]) / (axis[cell + 1] - axis[cell]), 0.0, 1.0)
    return cell, place, (at > axis[-1] + 1.0) | (at < axis[0] - 1.0)


def build_surface(
    rows: pd.DataFrame, *, features: list[str], weights: list[float], axes: list[str], seconds: str, bound: str
) -> Surface:
    """From rows with a measured time and a roofline bound in seconds. Where several kernels were timed at one point, the fastest
    counts: an engine chooses too. Times never fall along an axis (a larger load that was timed faster is noise)."""
    names = [*axes, "_one"][:2]
    data = rows.assign(_one=1.0) if len(axes) == 1 else rows
    floor = 0.8 * float(data[seconds].min())
    best = data.groupby([*features, *names], sort=True)[[seconds, bound]].min().reset_index()
    best["_log"] = np.log(best[seconds] / (floor + best[bound]))
    best["_bound"] = floor + best[bound]
    grid = [np.sort(best[name].unique()).astype(float) for name in names]
    keys = best[features].drop_duplicates().reset_index(drop=True)
    keys["_curve"] = np.arange(len(keys))
    placed = best.merge(keys, on=features)
    cube = np.full((len(keys), len(grid[0]), len(grid[1])), np.nan)
    a, b = (np.searchsorted(grid[axis], placed[name].to_numpy(float)) for axis, name in enumerate(names))
    cube[placed["_curve"].to_numpy(), a, b] = placed["_log"].to_numpy()
    return Surface(
        features=np.log2(keys[features].to_numpy(float) + 1.0) * np.asarray(weights),
        weights=np.asarray(weights, float),
        axes=(np.log2(grid[0]), np.log2(grid[1])),
        log_ratio=_filled(_filled(cube, 2, np.log2(grid[1])), 1, np.log2(grid[0])),
        floor_seconds=floor,
    )


def _filled(cube: Floats, axis: int, points: Floats) -> Floats:
    """Holes along an axis by linear interpolation between neighbours on that axis, ends held; lines without any point stay."""
    lines = np.moveaxis(cube, axis, -1)
    shape = lines.shape
    flat = lines.reshape(-1, shape[-1]).copy()
    for row in np.flatnonzero(np.isnan(flat).any(axis=1) & ~np.isnan(flat).all(axis=1)):
        known = ~np.isnan(flat[row])
        flat[row] = np.interp(points, points[known], flat[row][known])
    return np.moveaxis(flat.reshape(shape), -1, axis)
