"""Which part of a candidate bought how much: effects that add up in log time, learned from measured pairs, with honest widths.

A measured pair says log(time of the incumbent / time of the candidate) for two sets of things (parts, their parameters, settings). The
model is that the logarithms of the things add: what both have cancels, so that measurements against different incumbents speak of the
same effects. Effects have normal priors around nothing; what they cannot explain (parts that help or hinder each other) is a noise of
its own, chosen by the evidence. Intervals are widened until they would have held the candidates left out one by one, and with few
candidates they stay wide: an effect that was never measured is its prior. A fit is immutable; its version is the hash of its content.

Not here: where pairs come from, and what a campaign makes of a prediction (`cluster.predicting`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.interval import Z90, Interval

Floats = NDArray[np.float64]

PRIOR = 0.35
"""Standard deviation of a thing's log effect before it is measured: most parts that anybody writes stay within a factor of 1.8."""
BOUND_SHARE = 0.5
"""Of the prior, for the binding of a parameter: `cpp(bits=4)` is `cpp` and a smaller effect of its own."""
NOISES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Standard deviations of what things together do beyond their sum; the likeliest is taken."""
LEAST_DEVIATION = 0.003
"""Of a measured log ratio, where it claims to be surer."""
FEW = 10
"""Candidates below which intervals cannot be calibrated: they are doubled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One measured comparison."""

    candidate: str
    """Identity; pairs of one candidate are left out together."""
    things: frozenset[str]
    against: frozenset[str]
    """Of the incumbent."""
    log_speedup: float
    """log(incumbent's time / candidate's time)."""
    deviation: float
    """Standard deviation of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """One thing's share of a candidate's log speedup, as a factor on speed."""

    thing: str
    speedup: Interval
    pairs: int
    """Measured comparisons in which one side had it and the other had not."""


@dataclass(frozen=True, kw_only=True)
class Effects:
    """One fit. Asked once for each candidate of a search, so what every answer needs is worked out once."""

    things: tuple[str, ...]
    mean: tuple[float, ...]
    """Log effect of each on speed."""
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    """Standard deviation of what the sum does not explain."""
    widen: float
    """Factor on deviations that the candidates left out asked for; at least 1."""
    num_candidates: int
    num_pairs: int
    seen: Mapping[str, int]
    """Thing → pairs that tell of it."""
    held_out_error: float
    """Median absolute error of the speedup of a candidate left out of the fit; nan with fewer than three."""

    @cached_property
    def version(self) -> str:
        """Hash of everything above; of the arrays' bytes, since spelling tens of thousands of numbers takes longer than the fit."""
        told = [
            self.things,
            self.noise,
            self.widen,
            self.num_candidates,
            self.num_pairs,
            self.seen,
            self.held_out_error,
        ]
        found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        for array in self._belief:
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:12]

    def predict(self, things: Iterable[str], against: Iterable[str] = ()) -> Interval:
        """Speedup over `against` (without: over nothing), with its 90 % interval."""
        mean, deviation = self.log_speedup(frozenset(things), frozenset(against))
        return Interval.around(math.exp(mean), deviation)

    def log_speedup(self, things: frozenset[str], against: frozenset[str]) -> tuple[float, float]:
        """Mean and standard deviation of the log of the speedup; things that were never in a pair have their prior's width."""
        differing = sorted(things ^ against)  # what both have cancels
        known = [thing for thing in differing if thing in self._places]
        places = np.array([self._places[thing] for thing in known], np.intp)
        signs = np.array([1.0 if thing in things else -1.0 for thing in known])
        mean, covariance = self._belief
        variance = float(signs @ covariance[np.ix_(places, places)] @ signs) if known else 0.0
        variance += sum(_prior(thing) ** 2 for thing in differing if thing not in self._places)
        if differing:
            variance += self.noise**2
        return float(signs @ mean[places]) if known else 0.0, self.widen * math.sqrt(variance)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {thing: place for place, thing in enumerate(self.things)}

    @cached_property
    def _belief(self) -> tuple[Floats, Floats]:
        """Mean [things] and covariance [things, things]."""
        return np.array(self.mean), np.array(self.covariance).reshape(len(self.things), len(self.things))

    def chance_above(self, things: frozenset[str], log_speedup: float) -> float:
        """Probability that the candidate's log speedup (over nothing) is beyond this."""
        mean, deviation = self.log_speedup(things, frozenset())
        if deviation == 0:
            return float(mean > log_speedup)
        return 0.5 * math.erfc((log_speedup - mean) / deviation / math.sqrt(2))

    def knows(self, things: Iterable[str]) -> bool:
        """Whether each of them was told apart in some pair."""
        return all(self.seen.get(thing, 0) > 0 for thing in things)

    def attribution(self, things: Iterable[str]) -> tuple[Effect, ...]:
        """Each thing's factor, the largest first; their product is the predicted speedup."""
        made = [
            Effect(thing=thing, speedup=self.predict({thing}), pairs=self.seen.get(thing, 0))
            for thing in sorted(things)
        ]
        return tuple(sorted(made, key=lambda effect: -effect.speedup.value))

    def next_measurement(self, candidates: Mapping[str, frozenset[str]], lead: float) -> str | None:
        """Of those not measured yet (name → things), whose measurement promises most over a lead's log speedup: expected improvement.
        None when there are none."""
        if not candidates:
            return None
        return max(sorted(candidates), key=lambda name: self.expected_gain(candidates[name], lead))

    def expected_gain(self, things: frozenset[str], lead: float) -> float:
        """Expected improvement of the log speedup beyond `lead` (Jones, Schonlau and Welch 1998)."""
        mean, deviation = self.log_speedup(things, frozenset())
        if deviation == 0:
            return max(mean - lead, 0.0)
        z = (mean - lead) / deviation
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return deviation * (density + z * 0.5 * math.erfc(-z / math.sqrt(2)))


def fit_effects(pairs: Sequence[Pair]) -> Effects:
    """From pairs in any order; without any, everything is its prior."""
    told = [pair for pair in pairs if pair.things != pair.against]
    things = tuple(sorted({thing for pair in told for thing in pair.things ^ pair.against}))
    rows = np.array([_row(things, pair.things, pair.against) for pair in told]).reshape(len(told), len(things))
    values = np.array([pair.log_speedup for pair in told])
    spread = np.array([max(pair.deviation, LEAST_DEVIATION) for pair in told])
    prior = np.array([_prior(thing) ** 2 for thing in things])
    noise = max(NOISES, key=lambda sigma: _evidence(rows, values, spread**2 + sigma**2, prior)) if told else NOISES[-1]
    mean, covariance = _posterior(rows, values, spread**2 + noise**2, prior)
    names = sorted({pair.candidate for pair in told})
    errors, scaled = _left_out(told, names, rows, values, spread, noise, prior)
    return Effects(
        things=things, mean=tuple(mean.tolist()), covariance=tuple(tuple(line) for line in covariance.tolist()), noise=noise,
        widen=_widen(scaled), num_candidates=len(names), num_pairs=len(told),
        seen={thing: int(np.abs(rows[:, place]).sum()) for place, thing in enumerate(things)},
        held_out_error=float(np.median(np.abs(np.expm1(errors)))) if len(names) >= 3 else float("nan"),
    )  # fmt: skip


def _prior(thing: str) -> float:
    return PRIOR * (BOUND_SHARE if "(" in thing else 1.0)


def _row(known: Sequence[str], things: frozenset[str], against: frozenset[str]) -> Floats:
    return np.array([float(thing in things) - float(thing in against) for thing in known])


def _posterior(rows: Floats, values: Floats, variance: Floats, prior: Floats) -> tuple[Floats, Floats]:
    """Of normal effects under normal errors."""
    precision = rows.T @ (rows / variance[:, None]) + np.diag(1.0 / prior)
    covariance = np.asarray(np.linalg.inv(precision), np.float64)
    return covariance @ (rows.T @ (values / variance)), covariance


def _evidence(rows: Floats, values: Floats, variance: Floats, prior: Floats) -> float:
    """Log of the marginal likelihood."""
    total = rows @ (prior[:, None] * rows.T) + np.diag(variance)
    _, logdet = np.linalg.slogdet(total)
    return float(-0.5 * (values @ np.linalg.solve(total, values) + logdet))


def _left_out(
    pairs: Sequence[Pair], names: Sequence[str], rows: Floats, values: Floats, spread: Floats, noise: float, prior: Floats
) -> tuple[Floats, Floats]:  # fmt: skip
    """Per candidate: error of its first pair's log speedup by a fit without it, and that over the deviation that was claimed.

    The fit without it is the whole one updated by minus its pairs (Woodbury), not another inversion a candidate.
    """
    errors, scaled = [], []
    variance = spread**2 + noise**2
    mean, covariance = _posterior(rows, values, variance, prior)
    inside: dict[str, list[int]] = {name: [] for name in names}
    for place, pair in enumerate(pairs):
        inside[pair.candidate].append(place)
    for name in names:
        own = rows[inside[name]]
        within = own @ covariance @ own.T
        room = np.linalg.inv(np.diag(variance[inside[name]]) - within)
        left = variance[inside[name]] * (room @ (values[inside[name]] - own @ mean))
        without = float(within[0, 0] + within[0] @ room @ within[0])
        errors.append(float(left[0]))
        scaled.append(abs(errors[-1]) / math.sqrt(without + float(variance[inside[name][0]])))
    return np.array(errors), np.array(scaled)


def _widen(scaled: Floats) -> float:
    """Conformal: the quantile of the scaled errors that a further candidate stays below in 90 % of cases, over a normal's."""
    count = len(scaled)
    if count < FEW:
        return 2.0
    rank = min(math.ceil(0.9 * (count + 1)), count)
    return max(1.0, float(np.sort(scaled)[rank - 1]) / Z90)
