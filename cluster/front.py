"""With two objectives there is no single best: the Pareto front of a search, and of what was measured cold.

    attempts of the search ─► values by objective ─► search_front ─► who is measured cold (`cluster.finish`)
    cold results, gates ─► spans_of (each objective with its interval) ─► cold_front ─► `front` decision ─► result, report, API

The first objective alone decides promotion, the winner and the release; the front shows what else could be had. What is not here:
how a search finds its points (`search.study`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.state import SEARCHING, CampaignState
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Attempt, Estimate, MeasureResult, Tier
from hotpass.stats import SequentialTest
from search.objectives import TOKENS_PER_S, log_ratios_of
from search.values import Values, front_of
from verification.gates import GATES


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A finalist of a campaign with two objectives, after its cold measurement."""

    candidate_id: str
    attempt_seq: int
    """Of its cold attempt."""
    spans: Mapping[str, Estimate]
    """Objective → ratio over the deployment as loaded."""
    gates: Mapping[str, str]
    """Gate → `pass`, `fail: …` or `not run: …`."""

    @property
    def is_sound(self) -> bool:
        """Every gate passed but the one that asks for more tokens per second, and it is surely better in one objective."""
        others = [name for name in GATES if name != "cold"]
        return all(self.gates.get(name) == "pass" for name in others) and any(s.low > 1 for s in self.spans.values())


def values_of(state: CampaignState, objectives: Sequence[str]) -> Values:
    """Of everything that the search timed on the fast tier, over as loaded."""
    values = Values(objectives)
    for row in state.attempts:
        attempt = row.attempt
        if attempt.purpose in SEARCHING and values.can_chain(attempt.incumbent_id):
            values.take(attempt, is_one_with_incumbent=attempt.tier is Tier.SLOW)
    return values


def search_front(state: CampaignState, objectives: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Candidate id → ratios over as loaded of those that no other one beats in every objective, by the first objective.

    Point estimates of the search; whoever the slow tier refused is not among them, nor is the deployment as loaded.
    """
    refused = {
        row.attempt.candidate_id
        for row in state.attempts
        if row.attempt.tier is Tier.SLOW and not row.attempt.verdict.is_timed
    }
    known = {key: value for key, value in values_of(state, objectives).every.items() if key not in refused}
    front = [key for key in front_of(known) if key != AS_LOADED.id]
    return {key: tuple(math.exp(value) for value in known[key]) for key in front}


def spread(front: Sequence[str], limit: int) -> list[str]:
    """So many of a front, its two ends first, then evenly between them."""
    if len(front) <= limit:
        wanted = list(range(len(front)))
    else:
        wanted = [round(index * (len(front) - 1) / max(1, limit - 1)) for index in range(limit)]
    ends_first = sorted(wanted, key=lambda index: (index not in (0, len(front) - 1), index))
    return [front[index] for index in ends_first]


def spans_of(attempt: Attempt, result: MeasureResult, objectives: Sequence[str]) -> dict[str, Estimate]:
    """Ratios of a cold measurement with intervals; an objective that the deployment's rows do not show is left out.

    The first is the attempt's own. The other is of the same rounds, by the sequential test's interval, which holds at every look:
    it does not matter that the first objective decided when to stop.
    """
    if attempt.speedup is None:
        return {}
    found = {TOKENS_PER_S: attempt.speedup}
    for objective in objectives:
        logs = log_ratios_of(result, objective) if objective != TOKENS_PER_S else []
        if logs:
            test = SequentialTest(result.assignment.stopping)
            for value in logs:
                test.add(value)
            low, high = test.interval()
            found[objective] = replace(
                attempt.speedup,
                value=math.exp(test.mean),
                low=math.exp(low),
                high=math.exp(high) if math.isfinite(high) else math.inf,
                level=1 - result.assignment.stopping.alpha,
            )
    return {objective: found[objective] for objective in objectives if objective in found}


def cold_front(finalists: Sequence[Standing], objectives: Sequence[str]) -> list[Standing]:
    """Those of the sound ones that no other sound one beats in every objective, by the first."""
    sound = {f.candidate_id: f for f in finalists if f.is_sound and len(f.spans) == len(objectives)}
    values = {key: tuple(f.spans[name].value for name in objectives) for key, f in sound.items()}
    return [sound[key] for key in front_of(values)]
