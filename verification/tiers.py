"""Speed from blocks: the log ratio of each round, over the whole model or extrapolated from two cuts.

With cuts of depths d1 < d2 a step of L layers is predicted as t(d1) + (L - d1) * (t(d2) - t(d1)) / (d2 - d1), side by side with
the same prediction for the incumbent; what comes of it is `predicted`, and the depth difference and the fixed part are kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotpass.records.measurement import Estimate, MeasuredBlock, Stopping
from hotpass.stats import SequentialTest, rounds_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What the blocks of one attempt say."""

    decision: str
    """Of the sequential test over rounds; `exhausted` when it had not stopped by itself."""
    low: float
    high: float
    """Interval of the log ratio, valid at every look."""
    estimate: Estimate
    """Deployment-weighted speedup."""
    per_layer: Estimate | None
    """Speedup of one layer of depth; None when one depth was measured."""
    fixed: Estimate | None
    """Speedup of what does not grow with depth (embedding, head); None when one depth was measured or it is lost in noise."""
    candidate_ms: float
    """Mean weighted step time of the candidate, of the full depth."""
    incumbent_ms: float
    rounds: int


def speed_of(blocks: Sequence[MeasuredBlock], num_layers: int, stopping: Stopping) -> Speed:
    """Raises ValueError without a whole round."""
    rounds = rounds_of(blocks)
    if not rounds:
        raise ValueError("no whole round was measured")
    pairs = [_full_step_ms(group, num_layers) for group in rounds]
    test = SequentialTest(stopping)
    for incumbent, candidate in pairs:
        test.add(math.log(incumbent / candidate))
    depths = sorted({block.layers for block in blocks})
    predicted = depths != [num_layers]
    low, high = test.interval()
    mean_incumbent = float(np.mean([pair[0] for pair in pairs]))
    mean_candidate = float(np.mean([pair[1] for pair in pairs]))
    return Speed(
        decision=test.decision() or "exhausted",
        low=low,
        high=high,
        estimate=Estimate(
            value=mean_incumbent / mean_candidate,
            low=_factor(low),
            high=_factor(high),
            level=1 - stopping.alpha,
            kind="predicted" if predicted else "measured",
        ),
        per_layer=_depth_estimate(rounds, stopping, "slope") if len(depths) > 1 else None,
        fixed=_depth_estimate(rounds, stopping, "fixed") if len(depths) > 1 else None,
        candidate_ms=mean_candidate,
        incumbent_ms=mean_incumbent,
        rounds=len(rounds),
    )


def _full_step_ms(group: Sequence[MeasuredBlock], num_layers: int) -> tuple[float, float]:
    """(incumbent, candidate) weighted step time of the full depth in one round."""
    depths = sorted({block.layers for block in group})
    if len(depths) == 1:
        return _weighted(group, candidate=False), _weighted(group, candidate=True)
    sides = []
    for candidate in (False, True):
        slope, fixed = _slope_and_fixed(group, candidate)
        sides.append(max(fixed + num_layers * slope, 1e-9))
    return sides[0], sides[1]


def _slope_and_fixed(group: Sequence[MeasuredBlock], candidate: bool) -> tuple[float, float]:
    shallow, deep = min(block.layers for block in group), max(block.layers for block in group)
    at_shallow = _weighted([b for b in group if b.layers == shallow], candidate=candidate)
    at_deep = _weighted([b for b in group if b.layers == deep], candidate=candidate)
    slope = (at_deep - at_shallow) / (deep - shallow)
    return slope, at_shallow - shallow * slope


def _depth_estimate(rounds: Sequence[Sequence[MeasuredBlock]], stopping: Stopping, which: str) -> Estimate | None:
    index = 0 if which == "slope" else 1
    pairs = [(_slope_and_fixed(group, False)[index], _slope_and_fixed(group, True)[index]) for group in rounds]
    if any(a <= 0 or b <= 0 for a, b in pairs):
        return None
    test = SequentialTest(stopping)
    for incumbent, candidate in pairs:
        test.add(math.log(incumbent / candidate))
    low, high = test.interval()
    return Estimate(
        value=math.exp(test.mean),
        low=_factor(low),
        high=_factor(high),
        level=1 - stopping.alpha,
    )


def _weighted(blocks: Sequence[MeasuredBlock], *, candidate: bool) -> float:
    """Mean step time over rows by their share of steps (shares of the rows measured, so that a cut table still weighs 1)."""
    pairs = [(b.row.steps_share, b.candidate_step_ms if candidate else b.incumbent_step_ms) for b in blocks]
    return sum(share * ms for share, ms in pairs) / sum(share for share, _ in pairs)


def _factor(log: float) -> float:
    """exp, from 0 to infinity: an interval without an end has none."""
    return math.exp(log) if log < 700 else math.inf
