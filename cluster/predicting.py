"""What a campaign expects of a candidate before measuring it, from what it has measured: for order, for pruning, and for people.

    attempts of the log ──► pairs ──► costmodel.effects ──► Prediction(measure | prune | audit) ──► `prediction` event

A prediction is a function of the log, the candidate and the campaign's seed, so a replay predicts alike. It never decides that
something is fast. What it may do is leave out a candidate of the built-in search that has no chance left, and it is held to that:
a random share of these is measured all the same, and once one of them beats the incumbent nothing is left out any more. Not pruned:
what people and agents hand in, anything with a part or value that was never measured, and everything while intervals are young.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np

from cluster.state import SEARCHING, AttemptRow, CampaignState
from costmodel.effects import Effect, Effects, Pair, fit_effects
from costmodel.interval import Z90, Interval
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict
from search.proposers import Proposer as Who

LEAST_CANDIDATES = 16
"""Distinct candidates that must have been timed before anything is left out."""
HOPELESS = 0.01
"""Chance of beating the incumbent below which a candidate is left out."""
TRUSTED_ERROR = 0.10
"""Median error on candidates left out of the fit beyond which nothing is left out: such a model cannot tell."""
AUDIT_SHARE = 0.02
"""Of those that would be left out: measured all the same, by chance."""
REMEMBERED = 400
"""Latest pairs that are learned from, so that a long search does not grow slower."""
MOST_IN_A_ROW = 20
"""Left out one after the other; the next one is measured, so that a campaign cannot spend itself on deciding."""
OWN = (Who.SCREENING, Who.NEIGHBOUR, Who.OPTUNA, Who.TUNER)
"""Proposers whose candidates may be left out."""

T = TypeVar("T")


class Decision(StrEnum):
    """What follows from a prediction."""

    MEASURE = "measure"
    PRUNE = "prune"
    AUDIT = "audit"
    """It would have been left out, and is measured to see whether that would have been right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One candidate, before it was measured."""

    candidate_id: str
    incumbent_id: str
    speedup_vs_loaded: Estimate
    """Level 0.9, kind `predicted`."""
    decision: Decision
    reason: str
    version: str
    """Of the fit."""
    num_candidates: int
    """That the fit learned from."""
    held_out_error: float | None
    """Of that fit, on candidates left out; None with fewer than three."""


def things_of(candidate: Candidate) -> frozenset[str]:
    """Parts (by name and source), their bound parameters, settings: what effects are learned of."""
    found = {f"{name}={value}" for name, value in candidate.settings.items()}
    found |= {f"{kind}{degree}" for kind, degree in candidate.parallelism.items() if degree != 1}
    for use in candidate.parts:
        name = f"{use.source.name}#{use.source.sha256[:6]}"
        found |= {name, *(f"{name}({key}={value})" for key, value in use.params.items())}
    return frozenset(found)


def shown(thing: str) -> str:
    """A thing without the hash of its source."""
    name, _, rest = thing.partition("#")
    return name + rest[6:] if rest else thing


def pairs_of(rows: Sequence[AttemptRow], candidates: Mapping[str, Candidate]) -> list[Pair]:
    """The same of rows of the state."""
    return pairs_among([row.attempt for row in rows[-REMEMBERED:]], candidates)


def pairs_among(attempts: Sequence[Attempt], candidates: Mapping[str, Candidate]) -> list[Pair]:
    """The timed fast-tier attempts against what they were measured against; the latest of each two."""
    found: dict[tuple[str, str], Pair] = {}
    for attempt in attempts[-REMEMBERED:]:
        candidate, incumbent = candidates.get(attempt.candidate_id), candidates.get(attempt.incumbent_id)
        looked = attempt.tier is Tier.FAST and attempt.purpose in (*SEARCHING, Purpose.AUDIT)
        if candidate is None or incumbent is None or attempt.speedup is None or not looked:
            continue
        if not attempt.verdict.is_timed or not attempt.speedup.value > 0:
            continue
        found[candidate.id, incumbent.id] = Pair(
            candidate=candidate.id, things=things_of(candidate), against=things_of(incumbent),
            log_speedup=math.log(attempt.speedup.value), deviation=_deviation(attempt.speedup),
        )  # fmt: skip
    return list(found.values())


def _deviation(estimate: Estimate) -> float:
    """Of the log ratio; an interval without an end counts as a wide one."""
    z = Z90 if estimate.level <= 0.9 else 1.96
    ends = [math.log(estimate.high / estimate.value)] if math.isfinite(estimate.high) else []
    ends += [math.log(estimate.value / estimate.low)] if estimate.low > 0 else []
    return max(ends) / z if len(ends) == 2 else 0.3


def milestone(attempts: int) -> int:
    """Of so many attempts, those that expectations are learned from: all at first, then all but the last few per cent. A function of
    the count alone, so that a resumed or replayed campaign expects the same."""
    step = 1 << max(0, (attempts // 16).bit_length() - 1)
    return attempts - attempts % step


class Foresight:
    """The expectations of one campaign; learns again with each attempt at first, later with every few per cent more of them."""

    def __init__(self, state: CampaignState, candidates: Mapping[str, Candidate], seed: int) -> None:
        self.state, self.candidates, self.seed = state, candidates, seed
        self._known = -1
        self._effects = fit_effects([])

    @property
    def effects(self) -> Effects:
        known = milestone(len(self.state.attempts))
        if self._known != known:
            self._known = known
            self._effects = fit_effects(
                pairs_of(self.state.attempts[:known], {AS_LOADED.id: AS_LOADED, **self.candidates})
            )
        return self._effects

    def consider(self, candidate: Candidate) -> Prediction:
        """What is expected of it, and whether it is worth measuring."""
        effects, things = self.effects, things_of(candidate)
        decision, reason = self._judged(candidate, things)
        span = effects.predict(things)
        error = effects.held_out_error
        return Prediction(
            candidate_id=candidate.id, incumbent_id=self.state.incumbent_id,
            speedup_vs_loaded=Estimate(value=span.value, low=span.low, high=span.high, level=0.9, kind="predicted"),
            decision=decision, reason=reason, version=effects.version, num_candidates=effects.num_candidates,
            held_out_error=error if math.isfinite(error) else None,
        )  # fmt: skip

    def ordered(self, items: Sequence[T], candidate_of: Callable[[T], Candidate]) -> list[T]:
        """Those that promise most over the incumbent first; what was never measured promises by what is not known of it."""
        lead = math.log(self.state.lead.value)
        return sorted(items, key=lambda item: -self.effects.expected_gain(things_of(candidate_of(item)), lead))

    def _judged(self, candidate: Candidate, things: frozenset[str]) -> tuple[Decision, str]:
        effects = self.effects
        info = self.state.candidates.get(candidate.id)
        if info is None or info.proposer not in OWN:
            return Decision.MEASURE, "handed in, which is always measured"
        if effects.num_candidates < LEAST_CANDIDATES:
            return Decision.MEASURE, f"only {effects.num_candidates} candidates are known"
        if not effects.knows(things):
            strange = sorted(shown(thing) for thing in things if not effects.knows({thing}))
            return Decision.MEASURE, f"{strange[0]} was never measured"
        if not effects.held_out_error <= TRUSTED_ERROR:
            return Decision.MEASURE, f"expectations are off by {effects.held_out_error:.0%} on candidates left out"
        beaten = self.state.audit_beat
        if beaten:
            return Decision.MEASURE, f"{self.state.label_of(beaten)} was to be left out, and was faster"
        if self.state.pruned_in_a_row >= MOST_IN_A_ROW:
            return Decision.MEASURE, f"{MOST_IN_A_ROW} were left out in a row"
        chance = effects.chance_above(things, math.log(self.state.lead.value))
        if chance >= HOPELESS:
            return Decision.MEASURE, f"chance of {chance:.0%} to beat the incumbent"
        drawn = np.random.default_rng([self.seed, int(candidate.id[:12], 16)]).random() < AUDIT_SHARE
        told = f"chance below {HOPELESS:.0%} to beat the incumbent"
        return (Decision.AUDIT, f"{told}; measured all the same, by chance") if drawn else (Decision.PRUNE, told)


def by_promise(
    items: Sequence[T], candidate_of: Callable[[T], Candidate], effects: Effects, within: Candidate
) -> list[T]:
    """What is near `within`, those first that are expected to gain most over it by the effects of parts, parameters and settings that
    were learned; as they came where nothing was."""
    if not effects.num_candidates:
        return list(items)
    lead = effects.log_speedup(things_of(within), frozenset())[0]
    return sorted(items, key=lambda item: -effects.expected_gain(things_of(candidate_of(item)), lead))


def audits_won(state: CampaignState) -> list[str]:
    """Candidates that were to be left out, were faster when audited, and were not measured again as any other: the campaign was
    interrupted in between."""
    won = [
        r.attempt for r in state.attempts if r.attempt.purpose is Purpose.AUDIT and r.attempt.verdict is Verdict.FASTER
    ]
    return [
        key
        for key in dict.fromkeys(attempt.candidate_id for attempt in won)
        if not any(row.attempt.purpose in SEARCHING for row in state.attempts_of(key))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """How predictions of a campaign fared once their candidates were measured."""

    predicted: int
    measured: int
    """Of those: timed afterwards on the fast tier."""
    median_error: float | None
    within_90: float | None
    """Share whose measured speedup lay in the interval that was predicted."""
    pruned: int
    audited: int
    audit_beat: str
    """Candidate that was to be left out and was faster; empty without one."""


def trust_of(state: CampaignState) -> Trust:
    """From the log alone."""
    errors, held = [], []
    for candidate_id, expected in state.predictions.items():
        found = next(
            (
                row.speedup_vs_loaded
                for row in state.attempts_of(candidate_id)
                if row.attempt.tier is Tier.FAST and row.attempt.verdict.is_timed and row.speedup_vs_loaded
            ),
            None,
        )
        if found is not None:
            errors.append(abs(expected.value / found.value - 1.0))
            held.append(expected.low <= found.value <= expected.high)
    decisions = [expected.decision for expected in state.predictions.values()]
    return Trust(
        predicted=len(decisions), measured=len(errors), median_error=float(np.median(errors)) if errors else None,
        within_90=float(np.mean(held)) if held else None, pruned=decisions.count(Decision.PRUNE),
        audited=decisions.count(Decision.AUDIT), audit_beat=state.audit_beat,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """A measured candidate taken apart: effects that add in log time, and what they do not explain."""

    effects: tuple[Effect, ...]
    predicted: Interval
    """Their product, over as loaded."""
    beyond: float | None
    """Measured speedup over that product: parts that help (above 1) or hinder each other; None unless it was timed."""


def effects_of(state: CampaignState, candidates: Mapping[str, Candidate]) -> Effects:
    """What the campaign learned from all that it measured on the fast tier."""
    return fit_effects(pairs_of(state.attempts, {AS_LOADED.id: AS_LOADED, **candidates}))


def attribution_of(state: CampaignState, effects: Effects, candidate: Candidate) -> Attribution:
    """Which part bought how much, of one candidate."""
    things, fast = things_of(candidate), state.fast_speedup(candidate.id)
    predicted = effects.predict(things)
    return Attribution(
        effects=effects.attribution(things), predicted=predicted,
        beyond=fast.value / predicted.value if fast is not None else None,
    )  # fmt: skip
