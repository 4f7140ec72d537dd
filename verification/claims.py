"""What may be claimed of a winner: speedups by denominator, each with its interval and the name of what it is over.

All denominators are paired with the deployment as loaded in the same session, so a ratio of two of them is a ratio of ratios; its
interval adds both in log space. An empty class is None, never 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotpass.records.candidate import Numerics
from hotpass.records.measurement import BaselineMeasurement, Estimate
from hotpass.stats import speedup_of_blocks
from verification.numerics import summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One baseline of the session, relative to the deployment as loaded."""

    name: str
    numerics: Numerics
    speedup_vs_loaded: Estimate
    max_abs: float
    """Largest logit difference to the reference; infinity when it was not compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A speedup and its denominator."""

    estimate: Estimate
    baseline: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    vs_loaded: Claim
    vs_best_same_class: Claim | None
    """Over the best baseline whose class is the winner's or narrower; None when there is none."""
    vs_best_as_accurate: Claim | None
    """Over the best baseline whose largest logit difference is no greater than the winner's (within the noise); None likewise."""


def baseline_of(measured: BaselineMeasurement) -> Baseline | None:
    """None when it failed or has no whole round."""
    if measured.failure is not None or not measured.blocks:
        return None
    found = summary([check for check in measured.checks if check.against == "reference"])
    return Baseline(
        name=measured.name,
        numerics=measured.numerics,
        speedup_vs_loaded=speedup_of_blocks(measured.blocks),
        max_abs=found.get("max_abs", math.inf),
    )


def claims_of(
    cold: Estimate,
    numerics: Numerics,
    max_abs: float,
    noise_abs: float,
    loaded: Baseline,
    baselines: Sequence[Baseline],
) -> Claims:
    """`cold` is the winner over the deployment as loaded, measured cold. `loaded` stands among the denominators too."""
    everyone = [loaded, *baselines]
    same_class = [b for b in everyone if b.numerics.rank <= numerics.rank]
    as_accurate = [b for b in everyone if b.max_abs <= max(max_abs, noise_abs)]
    return Claims(
        vs_loaded=Claim(estimate=cold, baseline=loaded.name),
        vs_best_same_class=_over_best(cold, same_class),
        vs_best_as_accurate=_over_best(cold, as_accurate),
    )


def ratio(a: Estimate, b: Estimate) -> Estimate:
    """a ÷ b for independent estimates: half-widths add in quadrature, in log space, each side by itself."""
    centre = math.log(a.value / b.value)
    down = math.hypot(_log(a.value, a.low), _log(b.high, b.value))
    up = math.hypot(_log(a.high, a.value), _log(b.value, b.low))
    kind = a.kind if a.kind == b.kind else "mixed"
    return Estimate(
        value=math.exp(centre),
        low=math.exp(centre - down),
        high=math.exp(centre + up),
        level=min(a.level, b.level),
        kind=kind,
    )


def _over_best(cold: Estimate, among: Sequence[Baseline]) -> Claim | None:
    if not among:
        return None
    best = max(among, key=lambda b: b.speedup_vs_loaded.value)
    return Claim(estimate=ratio(cold, best.speedup_vs_loaded), baseline=best.name)


def _log(high: float, low: float) -> float:
    return math.log(high / low) if low > 0 and math.isfinite(high) else 50.0
