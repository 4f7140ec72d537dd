"""Which few of many plans to measure, when what is predicted of each has an interval.

    predictions with intervals ──► scenarios: what every plan might turn out to do, errors shared by engine and by deployment
                               ──► the plans that are within 5 % of a scenario's best, under the cap ──► the few that cover most scenarios

A plan whose predicted time is a little beyond a cap is dropped by a hard cap and may be the best; a plan a little within it may not
hold it. So the few are spread over what is uncertain rather than taken from the top of one ranking. Measured in turn, each
measurement moves what is expected of its engine and its deployment before the next is chosen, as a campaign does. Not here: what is
predicted, and what a measurement costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.interval import Z90

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

NEAR = 0.95
"""Of a scenario's best rate: as good as the best."""
ENGINE, DEPLOYMENT = 0.4, 0.4
"""Shares of the log error's variance that all plans of one engine have in common, and all loads of one deployment; the rest is a plan's own.
Variances of the calibrated errors of the public sample: 0.39, 0.41, 0.20."""
CORE = 0.5
"""Of the width that intervals would have if errors were normal: they have a narrow core and long tails, which 90 % intervals hold."""
SCENARIOS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Predicted times with their 90 % intervals, ms, arrays [plans]."""

    value: Floats
    low: Floats
    high: Floats

    def at(self, error: Floats) -> Floats:
        """Times [scenarios, plans] for errors in standard deviations."""
        scale = np.where(error < 0, np.log(self.value / self.low), np.log(self.high / self.value))
        return np.asarray(self.value * np.exp(CORE / Z90 * scale * error), np.float64)

    def error(self, measured_ms: float, plan: int) -> float:
        """Standard deviations that a measured time of one plan is away."""
        away = float(np.log(measured_ms / self.value[plan]))
        low, high = np.log(self.value[plan] / self.low[plan]), np.log(self.high[plan] / self.value[plan])
        return away / max(CORE / Z90 * float(low if away < 0 else high), 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Plans that compete, arrays [plans]."""

    tpot: Spans
    ttft: Spans
    work: Floats
    """Output tokens that all clients of a plan get in one cycle, over its accelerators."""
    output_tokens: Floats
    engines: Ints
    deployments: Ints
    """Number of the engine, and of the deployment, that a plan belongs to; equal where errors are shared."""

    def rate(self, tpot_ms: Floats, ttft_ms: Floats) -> Floats:
        """Output tokens per ms and accelerator."""
        return np.asarray(self.work / (ttft_ms + np.maximum(self.output_tokens - 1.0, 0.0) * tpot_ms), np.float64)


def shortlist(
    choices: Choices, cap_ms: float, count: int, measure: Callable[[int], tuple[float, float]] | None = None
) -> list[int]:
    """`count` plans to measure for the best rate under a cap of the time per token, in the order of choice. With `measure` (plan → TPOT and
    TTFT, ms) each is measured before the next is chosen. The same input gives the same plans."""
    plans = len(choices.work)
    drawn = np.random.default_rng(0)
    errors = [_drawn(drawn, choices), _drawn(drawn, choices)]
    seen: tuple[list[float], list[float]] = ([], [])
    guess = choices.rate(choices.tpot.value, choices.ttft.value)
    chosen: list[int] = []
    near = _near(choices, errors, cap_ms)
    open_: NDArray[np.bool_] = np.ones(SCENARIOS, np.bool_)
    while len(chosen) < min(count, plans):
        if not near[open_].any():
            open_[:] = True
        gain = near[open_].sum(axis=0) + 1e-6 * guess / guess.max()
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        chosen.append(best)
        if measure is None:
            open_ &= ~near[:, best]
            continue
        for span, times, ms in zip((choices.tpot, choices.ttft), seen, measure(best), strict=True):
            times.append(span.error(ms, best))
        moved = [_given(choices, error, chosen, times) for error, times in zip(errors, seen, strict=True)]
        near = _near(choices, moved, cap_ms)
        open_ = np.logical_not(near[:, chosen].any(axis=1))
    return chosen


def _drawn(drawn: np.random.Generator, choices: Choices) -> Floats:
    """Errors [scenarios, plans] in standard deviations."""
    engine, deployment = (
        drawn.standard_normal((SCENARIOS, int(kind.max()) + 1))[:, kind]
        for kind in (choices.engines, choices.deployments)
    )
    own = drawn.standard_normal((SCENARIOS, len(choices.work)))
    parts = ENGINE**0.5 * engine + DEPLOYMENT**0.5 * deployment + (1.0 - ENGINE - DEPLOYMENT) ** 0.5 * own
    return np.asarray(parts, np.float64)


def _near(choices: Choices, errors: list[Floats], cap_ms: float) -> NDArray[np.bool_]:
    """Plans [scenarios, plans] as good as the scenario's best."""
    tpot, ttft = choices.tpot.at(errors[0]), choices.ttft.at(errors[1])
    rate = np.where(tpot <= cap_ms, choices.rate(tpot, ttft), 0.0)
    best = rate.max(axis=1, keepdims=True)
    return np.asarray((rate >= NEAR * best) & (best > 0), np.bool_)


def _given(choices: Choices, errors: Floats, known: list[int], values: list[float]) -> Floats:
    """The same scenarios, made to agree with what was measured (Matheron's rule: Journel and Huijbregts 1978)."""
    shared = sum(
        share * (kind[:, None] == kind[None, known])
        for share, kind in ((ENGINE, choices.engines), (DEPLOYMENT, choices.deployments))
    )
    across = np.asarray(shared, np.float64)
    across[known, np.arange(len(known))] = 1.0
    missing = np.array(values)[None, :] - errors[:, known]
    return np.asarray(errors + np.linalg.solve(across[known], missing.T).T @ across.T, np.float64)
