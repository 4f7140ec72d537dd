"""Statistics of pairs: a sequential test that is valid at every look, intervals, and rank agreement.

The unit is a *round*: one block on every shape row, reduced to one log ratio of deployment-weighted step times. Steps within
a block are correlated, so no step is ever treated as a sample. Nothing here reads a clock or decides a verdict.

The test is the scale-invariant t-mixture of Lai (1976) as an e-process (Wang & Ramdas 2023, "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance"): with S = sum(x), V = sum(x^2) over n rounds and prior effect size
N(0, 1/c2), the process sqrt(c2/(n+c2)) * ((n+c2)V / ((n+c2)V - S^2))^(n/2) exceeds 1/alpha with probability at most alpha when the
mean is 0, over all looks together. Inverting it gives an interval that holds at every look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from hotpass.records.measurement import Estimate, MeasuredBlock, MeasuredReplay, Stopping

Decision = Literal["faster", "slower", "equal", "precise", "exhausted", "hopeless"]

PRIOR_PRECISION = 0.03
"""c2 of the mixture: near-optimal for effects of half to ten standard deviations of a round within 3 to 40 rounds."""

LEAST_SIGMA = 2e-4
"""Floor of the standard deviation of a round's log ratio: two identical readings are the clock's grain, not certainty."""


def confidence_radius(num_rounds: int, sigma: float, alpha: float, prior_precision: float = PRIOR_PRECISION) -> float:
    """Half width of the interval after `num_rounds` rounds with standard deviation `sigma` (ddof 0); infinity when undecidable yet."""
    if num_rounds < 2:
        return math.inf
    n, c2 = num_rounds, prior_precision
    threshold = (math.sqrt((n + c2) / c2) / alpha) ** (2 / n)
    room = (n + c2) - threshold * c2
    if room <= 0:
        return math.inf
    return sigma * math.sqrt((threshold - 1) * (n + c2) / room)


class SequentialTest:
    """Feed it one log ratio a round; ask after each whether to go on.

    `faster`/`slower`: the interval excludes 0 and is either beyond the margin or as narrow as asked · `equal`: it lies within the
    equal margin · `precise`: as narrow as asked without excluding 0 · `exhausted`: the rounds are used up · `hopeless`: given up far
    behind, undecided.
    """

    def __init__(self, stopping: Stopping) -> None:
        self.stopping = stopping
        self.values: list[float] = []

    def add(self, log_ratio: float) -> None:
        """Raises ValueError for a value that is not finite."""
        if not math.isfinite(log_ratio):
            raise ValueError(f"a log ratio of {log_ratio} is no measurement")
        self.values.append(log_ratio)

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else 0.0

    @property
    def sigma(self) -> float:
        return max(float(np.std(self.values)), LEAST_SIGMA) if len(self.values) > 1 else math.inf

    def interval(self) -> tuple[float, float]:
        """Of the mean log ratio, valid at every look at level 1 - alpha."""
        if len(self.values) < 2:
            return (-math.inf, math.inf)
        radius = confidence_radius(len(self.values), self.sigma, self.stopping.alpha)
        return (self.mean - radius, self.mean + radius)

    def decision(self) -> Decision | None:
        """None: measure another round."""
        n, rule = len(self.values), self.stopping
        if n and rule.hopeless is not None and self.mean < -rule.hopeless and n < rule.min_rounds:
            return "hopeless"
        if n < rule.min_rounds:
            return None
        low, high = self.interval()
        narrow = (high - low) / 2 <= rule.half_width
        if low > 0 and (narrow or low > rule.equal_margin):
            return "faster"
        if high < 0 and (narrow or high < -rule.equal_margin):
            return "slower"
        if -rule.equal_margin <= low and high <= rule.equal_margin:
            return "equal"
        if narrow:
            return "precise"
        return "exhausted" if n >= rule.max_rounds else None


def weighted_round(blocks: Sequence[MeasuredBlock]) -> float:
    """The log ratio of one round: log of sum(steps_share * incumbent ms) over sum(steps_share * candidate ms), all rows."""
    incumbent = sum(block.row.steps_share * block.incumbent_step_ms for block in blocks)
    candidate = sum(block.row.steps_share * block.candidate_step_ms for block in blocks)
    return math.log(incumbent / candidate)


def rounds_of(blocks: Sequence[MeasuredBlock]) -> list[list[MeasuredBlock]]:
    """Blocks grouped by round, whole rounds only (those with as many rows as the fullest), in order."""
    grouped: dict[int, list[MeasuredBlock]] = {}
    for block in blocks:
        grouped.setdefault(block.round_index, []).append(block)
    full = max((len(group) for group in grouped.values()), default=0)
    return [grouped[index] for index in sorted(grouped) if len(grouped[index]) == full]


def speedup_of_blocks(
    blocks: Sequence[MeasuredBlock], *, level: float = 0.95, seed: int = 0, kind: str = "measured"
) -> Estimate:
    """Deployment-weighted speedup: the ratio of sums over all rounds, its interval from a bootstrap over rounds.

    Raises ValueError without a whole round.
    """
    rounds = rounds_of(blocks)
    if not rounds:
        raise ValueError("no whole round was measured")
    incumbent = np.array([sum(b.row.steps_share * b.incumbent_step_ms for b in group) for group in rounds])
    candidate = np.array([sum(b.row.steps_share * b.candidate_step_ms for b in group) for group in rounds])
    return _ratio_estimate(incumbent, candidate, level, seed, kind)


def speedup_of_replays(
    replays: Sequence[MeasuredReplay], *, level: float = 0.95, seed: int = 0, kind: str = "measured"
) -> Estimate:
    """Speedup in tokens/s over replays of the same requests: the ratio of mean seconds per token, bootstrap over ABBA blocks."""
    if not replays:
        raise ValueError("no replay was measured")
    incumbent = np.array([sum(1 / s.tokens_per_second for s in replay.incumbent) for replay in replays])
    candidate = np.array([sum(1 / s.tokens_per_second for s in replay.candidate) for replay in replays])
    return _ratio_estimate(incumbent, candidate, level, seed, kind)


def tokens_per_second(blocks: Sequence[MeasuredBlock], output_tokens_per_step: float, *, candidate: bool) -> float:
    """Output tokens ÷ step time over the shape table, by the ratio of sums."""
    rounds = rounds_of(blocks)
    times = [
        sum(b.row.steps_share * (b.candidate_step_ms if candidate else b.incumbent_step_ms) for b in group)
        for group in rounds
    ]
    shares = [sum(b.row.steps_share for b in group) for group in rounds]
    return output_tokens_per_step * sum(shares) / sum(times) * 1e3


def _ratio_estimate(incumbent: np.ndarray, candidate: np.ndarray, level: float, seed: int, kind: str) -> Estimate:
    value = float(incumbent.sum() / candidate.sum())
    n = len(incumbent)
    if n == 1:
        return Estimate(value=value, low=0.0, high=math.inf, level=level, kind=kind)
    draws = np.random.default_rng(seed).integers(0, n, size=(2000, n))
    ratios = incumbent[draws].sum(axis=1) / candidate[draws].sum(axis=1)
    # A percentile bootstrap of few units is too narrow by sqrt(n / (n - 1)) and by the normal-for-t quantile: widen by both.
    low, high = np.quantile(np.log(ratios), [(1 - level) / 2, (1 + level) / 2])
    widen = math.sqrt(n / (n - 1)) * _t_over_normal(n - 1)
    centre = math.log(value)
    return Estimate(
        value=value,
        low=math.exp(centre + (low - centre) * widen),
        high=math.exp(centre + (high - centre) * widen),
        level=level,
        kind=kind,
    )


def _t_over_normal(dof: int) -> float:
    """0.975 quantile of Student's t over the normal's (table; Fisher & Yates)."""
    table = {
        1: 12.71,
        2: 4.30,
        3: 3.18,
        4: 2.78,
        5: 2.57,
        6: 2.45,
        7: 2.36,
        8: 2.31,
        9: 2.26,
        10: 2.23,
        15: 2.13,
        20: 2.09,
        30: 2.04,
    }
    known = max((k for k in table if k <= dof), default=1)
    return table[known] / 1.96


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings; None with fewer than two points or when one side is constant."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values against {len(b)}")
    concordant = tied_a = tied_b = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            da, db = np.sign(a[i] - a[j]), np.sign(b[i] - b[j])
            pairs += 1
            concordant += int(da * db)
            tied_a += int(da == 0)
            tied_b += int(db == 0)
    scale = math.sqrt((pairs - tied_a) * (pairs - tied_b)) if pairs else 0.0
    return concordant / scale if scale else None


def rounds_for(effect: float, sigma: float, alpha: float, power: float, *, max_rounds: int = 10_000) -> int:
    """Rounds after which the sequential test has found a true log effect with the stated power (normal noise), by the radius.

    The mean of n rounds exceeds the radius with probability `power` when effect - z(power)*sigma/sqrt(n) >= radius(n).
    """
    z = normal_quantile(power)
    for n in range(3, max_rounds):
        if effect - z * sigma / math.sqrt(n) >= confidence_radius(n, sigma, alpha):
            return n
    return max_rounds


def normal_quantile(p: float) -> float:
    """Of the standard normal, by the standard library."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def student_quantile(p: float, freedom: int) -> float:
    """Of Student's t with so many degrees of freedom, by its expansion about the normal's (Abramowitz & Stegun 26.7.5): from four
    degrees on within 2 % at p = 0.99, below that too small."""
    z, n = normal_quantile(p), float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, start=1))


def simulate_decisions(
    draw: Callable[[np.random.Generator], float], stopping: Stopping, repeats: int, seed: int
) -> dict[str, int]:
    """How often each decision is reached when rounds come from `draw`; for choosing error rates, and for tests. Simulated."""
    rng = np.random.default_rng(seed)
    counts: dict[str, int] = {}
    for _ in range(repeats):
        test = SequentialTest(stopping)
        while (decision := test.decision()) is None:
            test.add(draw(rng))
        counts[decision] = counts.get(decision, 0) + 1
    return counts
