"""What *decided* means, and what became of each candidate. Pure: nothing here measures.

A distinct candidate is decided when it is proven active and right, and its interval of the full model's deployment-weighted log step
time is at most ±2 % wide, or lies wholly beyond -2 % (rejected). Wrong ones, build failures, crashes and duplicates are counted apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import mean, stdev

from hotpass.records.measurement import Attempt, Stopping, Verdict
from hotpass.stats import confidence_radius

BOUND = 0.02
"""Of a log step time: the half width asked for, and the loss beyond which a candidate is rejected."""

STOPPING = Stopping(alpha=0.02, min_rounds=3, max_rounds=24, half_width=BOUND, equal_margin=BOUND, far_behind=0.5)
"""Of every paired arm: ends a loser once its interval lies beyond the bound, anything else once the interval is narrow."""

MOST_ROUNDS = 48
"""A promotion that would need more rounds than this is not begun."""


class Outcome(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    EQUAL = "equal"
    """Decided, and the interval contains no change."""
    UNDECIDED = "undecided"
    INCORRECT = "incorrect"
    INVALID = "invalid"
    BUILD_FAILED = "build failed"
    FAILED = "failed"
    DUPLICATE = "duplicate"

    @property
    def is_decided(self) -> bool:
        return self in (Outcome.FASTER, Outcome.SLOWER, Outcome.EQUAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One candidate in one arm."""

    name: str
    candidate_id: str
    outcome: Outcome
    seconds: float
    """Of the engine, everything included."""
    build_seconds: float = 0.0
    """Of these, a builder's."""
    low: float | None = None
    high: float | None = None
    """Interval of log(incumbent / candidate); None unless timed."""
    value: float | None = None
    rounds: int = 0
    reason: str = ""
    phases_ms: dict[str, float] = field(default_factory=dict)

    @property
    def is_faster(self) -> bool:
        """Its whole interval is above no change, narrow or not: the incumbent from then on."""
        return self.low is not None and self.low > 0

    @property
    def is_narrow(self) -> bool:
        """The interval is as narrow as asked (a decided one that is not lies beyond the bound)."""
        return self.low is not None and self.high is not None and (self.high - self.low) / 2 <= BOUND

    @property
    def sign(self) -> int:
        """What is claimed: +1 faster, -1 slower, 0 no change beyond the bound."""
        return 1 if self.outcome is Outcome.FASTER else -1 if self.outcome is Outcome.SLOWER else 0


def interval_of(attempt: Attempt) -> tuple[float, float, float]:
    """(low, value, high) as logs of the speedup over the incumbent."""
    found = attempt.speedup
    assert found is not None, "only of a timed attempt"
    low = math.log(found.low) if found.low > 0 else -math.inf
    return low, math.log(found.value), math.log(found.high) if math.isfinite(found.high) else math.inf


def outcome_of_interval(low: float, high: float) -> Outcome:
    if high < -BOUND:
        return Outcome.SLOWER
    if (high - low) / 2 > BOUND:
        return Outcome.UNDECIDED
    return Outcome.FASTER if low > 0 else Outcome.SLOWER if high < 0 else Outcome.EQUAL


def outcome_of(attempt: Attempt) -> Outcome:
    if attempt.verdict is Verdict.FAILED:
        return Outcome.BUILD_FAILED if attempt.reason.startswith("build") else Outcome.FAILED
    if attempt.verdict is Verdict.INCORRECT:
        return Outcome.INCORRECT
    if not attempt.verdict.is_timed:
        return Outcome.INVALID
    low, _, high = interval_of(attempt)
    return outcome_of_interval(low, high)


def rounds_needed(low: float, high: float, rounds: int, alpha: float) -> int | None:
    """Rounds at which an interval of the spread seen so far is as narrow as asked; None when too many."""
    if rounds < 2 or not (math.isfinite(low) and math.isfinite(high)):
        return 2 * max(2, rounds)
    unit = confidence_radius(rounds, 1.0, alpha)
    sigma = (high - low) / 2 / unit
    for count in range(rounds, MOST_ROUNDS + 1):
        if 1.2 * confidence_radius(count, sigma, alpha) <= BOUND:
            return count
    return None


def unpaired_interval(base: Sequence[float], candidate: Sequence[float]) -> tuple[float, float]:
    """98 % interval of the difference of mean log times, a process being the unit (Welch); infinite with fewer than two of either."""
    if len(base) < 2 or len(candidate) < 2:
        return -math.inf, math.inf
    parts = [stdev(values) ** 2 / len(values) for values in (base, candidate)]
    if sum(parts) == 0:
        return mean(base) - mean(candidate), mean(base) - mean(candidate)
    degrees = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (base, candidate), strict=True))
    radius = t_quantile(degrees) * math.sqrt(sum(parts))
    middle = mean(base) - mean(candidate)
    return middle - radius, middle + radius


def spread_of_starts(groups: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of log step times between starts of the same program, pooled over programs; None with no start to compare."""
    degrees = sum(len(group) - 1 for group in groups if len(group) > 1)
    if not degrees:
        return None
    return math.sqrt(sum(stdev(group) ** 2 * (len(group) - 1) for group in groups if len(group) > 1) / degrees)


def starts_needed(effect: float, sigma: float, most: int = 2000) -> int:
    """Cold starts of either side after which a Welch interval decides a candidate of that log effect: by its width, or by rejecting it."""
    for count in range(LEAST_STARTS, most):
        radius = t_quantile(2 * count - 2) * sigma * math.sqrt(2 / count)
        if radius <= BOUND or effect + radius < -BOUND:
            return count
    return most


T_99 = {1: 31.82, 2: 6.965, 3: 4.541, 4: 3.747, 5: 3.365, 6: 3.143, 7: 2.998, 8: 2.896, 10: 2.764, 15: 2.602, 30: 2.457}
"""0.99 quantile of Student's t (table; Fisher & Yates)."""


def t_quantile(degrees: float) -> float:
    """At the largest tabulated number that is not more: never too narrow."""
    return T_99[max(known for known in T_99 if known <= max(1.0, degrees))]


LEAST_STARTS = 2
"""Of a program from which an interval can be had."""

GIVEN_UP = 3
"""Cold starts that a candidate is worth which arm c gave up undecided."""


def projected_starts(judged: Sequence[Judged], sigma: float) -> int:
    """Cold starts of the whole list in arm a, each candidate's being what its effect in arm c takes there."""
    needed = [starts_needed(item.value or 0.0, sigma) for item in judged if item.outcome.is_decided]
    return _starts(judged, needed, GIVEN_UP)


def least_starts(judged: Sequence[Judged]) -> int:
    """Cold starts of the whole list in arm a if the least that have an interval were enough for each."""
    return _starts(judged, [LEAST_STARTS for item in judged if item.outcome.is_decided], LEAST_STARTS)


def _starts(judged: Sequence[Judged], decided: Sequence[int], undecided: int) -> int:
    """One for what fails or is wrong, none for what does not build or was proposed before; and those of as loaded, which all share."""
    once = (Outcome.INCORRECT, Outcome.INVALID, Outcome.FAILED)
    given_up = [undecided for item in judged if item.outcome is Outcome.UNDECIDED]
    compared = [*decided, *given_up]
    return sum(compared) + max(compared, default=0) + sum(item.outcome in once for item in judged)


def counted(judged: Sequence[Judged]) -> dict[str, int]:
    return {kind.value: count for kind, count in sorted(Counter(item.outcome for item in judged).items())}


def decided_per_hour(judged: Sequence[Judged], held_seconds: float) -> float:
    """`held_seconds`: of the engine from its start to its end."""
    return sum(item.outcome.is_decided for item in judged) / held_seconds * 3600
