"""What candidates are worth over the deployment as loaded: logs of ratios, one for each objective, chained through incumbents.

    attempt: ratio over its incumbent ─► take ─► value of the candidate = log ratio + value of that incumbent

The fast tier's values stay once there are some: all others are chained by them. What is not here: intervals (`Attempt.speedup` has
one, `cluster.front` another for what is claimed), and what a sampler makes of values (`search.study`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Attempt, Tier
from search.objectives import TOKENS_PER_S, ratio_of


class Values:
    """Of one search: fed with its attempts in order."""

    def __init__(self, objectives: Sequence[str] = (TOKENS_PER_S,)) -> None:
        self.objectives = tuple(objectives)
        self.leading: dict[str, float] = {AS_LOADED.id: 0.0}
        """Candidate id → value by the first objective, of everything that was timed."""
        self.every: dict[str, tuple[float, ...]] = {AS_LOADED.id: (0.0,) * len(self.objectives)}
        """The same by all objectives."""
        self._anchors: dict[str, tuple[float, ...]] = {}
        self._fast: set[str] = {AS_LOADED.id}

    def can_chain(self, candidate_id: str) -> bool:
        """Whether attempts against this one have a value."""
        return candidate_id in self.every or candidate_id in self._anchors

    def is_fast(self, candidate_id: str) -> bool:
        """Whether its values are those of the fast tier."""
        return candidate_id in self._fast

    def anchor(self, candidate_id: str, other: Values) -> None:
        """Something that others are chained to, at the values that it has elsewhere, without becoming a value here."""
        if candidate_id not in self.every and candidate_id in other.every:
            self._anchors[candidate_id] = other.every[candidate_id]

    def take(self, attempt: Attempt, *, is_one_with_incumbent: bool = False) -> tuple[float, ...]:
        """The attempt's values by each objective; empty unless it was timed and all of them are finite.

        `is_one_with_incumbent`: on the shapes that all values are of, the two are the same (settings of the serving loop). Raises
        ValueError when the incumbent never had a value.
        """
        if attempt.speedup is None or not attempt.verdict.is_timed:
            return ()
        base = self.every.get(attempt.incumbent_id, self._anchors.get(attempt.incumbent_id))
        if base is None:
            raise ValueError(
                f"the incumbent {attempt.incumbent_id[:10]} was never measured, so nothing can be chained to it"
            )
        ratios = [1.0 if is_one_with_incumbent else ratio_of(attempt, objective) for objective in self.objectives]
        values = tuple(math.log(r) + b if r > 0 else math.nan for r, b in zip(ratios, base, strict=True))
        if not all(math.isfinite(value) for value in values):
            return ()
        if attempt.tier is Tier.FAST or attempt.candidate_id not in self._fast:
            self.leading[attempt.candidate_id], self.every[attempt.candidate_id] = values[0], values
            if attempt.tier is Tier.FAST:
                self._fast.add(attempt.candidate_id)
        return values

    def update(self, other: Values) -> None:
        """Everything that another search over the same objectives knows."""
        self.leading |= other.leading
        self.every |= other.every
        self._anchors |= other._anchors
        self._fast |= other._fast


def front_of(values: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Ids that no other one is at least as good as in every objective and better in one: the Pareto front, by the first objective.

    At most two objectives. Of equals the first by id.
    """
    found: list[str] = []
    bar = -math.inf
    for candidate_id in sorted(values, key=lambda key: (*(-value for value in values[key]), key)):
        last = values[candidate_id][-1]
        if last > bar:
            found.append(candidate_id)
            bar = last
        if len(values[candidate_id]) == 1:
            break
    return found
