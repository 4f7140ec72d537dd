"""The end of a campaign: the finalists measured again cold, the first gates, what may be claimed, the release folder.

    finalists ─► cold: each side in its own fresh process, interleaved, inputs never used ─► gates ─► winner ─► result, release

Only what is measured here is claimed. A finalist that fails a gate hands on to the next; when none is left there is no winner, and
the result says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.front import Standing, cold_front, search_front, spans_of, spread
from cluster.plan import HOPELESS
from cluster.session import Session
from cluster.state import AttemptRow, BaselineRow, CampaignState
from hotpass.decode import json_safe
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics
from hotpass.records.measurement import Estimate, Purpose, Tier, Verdict
from search.objectives import TOKENS_PER_S, parse_objectives
from search.proposers import lowest_tier
from verification.claims import Baseline, Claim, Claims, claims_of
from verification.gates import first_gates, passed

RESULT_SCHEMA = 1
LOADED = "as loaded"
GIVEN_UP = math.exp(-HOPELESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A candidate after its cold measurement."""

    candidate: Candidate
    cold: AttemptRow
    gates: dict[str, str]
    """Gate → `pass`, `fail: …` or `not run: …`."""
    evidence: dict[str, str]
    """Gate → what it saw, also when it passed."""

    @property
    def may_win(self) -> bool:
        return passed(self.gates) and self.cold.attempt.verdict is Verdict.FASTER


def choose_finalists(state: CampaignState, limit: int, objectives: Sequence[str] = (TOKENS_PER_S,)) -> list[str]:
    """Candidate ids, the most promising first: the incumbent, then the fastest of the fast tier that were no slow-tier losers.

    With two objectives the incumbent, then others of the search's Pareto front, its ends first, and one more of them in all.
    """
    if len(objectives) > 1:
        others = [key for key in search_front(state, objectives) if key != state.incumbent_id]
        first = [state.incumbent_id] if state.incumbents else []
        return [*first, *spread(others, limit + 1 - len(first))]
    refused = {
        row.attempt.candidate_id
        for row in state.attempts
        if row.attempt.tier is Tier.SLOW and row.attempt.verdict not in (Verdict.FASTER, Verdict.INCONCLUSIVE)
    }
    fast = {
        row.attempt.candidate_id: row.speedup_vs_loaded.value
        for row in state.search_attempts()
        if row.attempt.tier is Tier.FAST and row.speedup_vs_loaded and row.speedup_vs_loaded.low > 1
    }
    if state.lead.low > 1:  # one with new settings of the serving loop was never on the fast tier
        fast.setdefault(state.incumbent_id, state.lead.value)
    ranked = sorted(fast, key=lambda candidate: (candidate != state.incumbent_id, -fast[candidate]))
    return [candidate for candidate in ranked if candidate not in refused and candidate != AS_LOADED.id][:limit]


def measure_finalists(session: Session) -> Finalist | None:
    """Measure the finalists cold until the budget is spent (the first always), and record the winner. None: nobody won.

    One that was slower beside a better finalist is measured only while none that passes is known."""
    plan, journal = session.plan, session.journal
    objectives = parse_objectives(plan.spec.objective)
    ids = choose_finalists(session.state, plan.pace.num_finalists, objectives)
    journal.decide("finalists", candidates=ids)
    measured: list[Finalist] = []
    for index, candidate_id in enumerate(ids):
        spent = journal.clock.seconds() > plan.spec.budget_seconds
        beaten = len(objectives) == 1 and is_beaten(session.state, candidate_id, ids[:index])
        if any(f.may_win for f in measured) and (spent or beaten):
            continue
        measured.append(measure_cold(session, session.candidates[candidate_id], AS_LOADED))
    best = best_of([finalist for finalist in measured if finalist.may_win])
    shown = best or (measured[0] if measured else None)
    if shown is not None:
        journal.decide(
            "winner" if best else "no-winner",
            candidate_id=shown.candidate.id,
            gates=shown.gates,
            gate_evidence=shown.evidence,
            attempt_seq=shown.cold.seq,
            claims=_claims(session, shown) if best else None,
        )
    if len(objectives) > 1:
        front = cold_front([_standing(session, finalist, objectives) for finalist in measured], objectives)
        journal.decide("front", objectives=objectives, candidates=front)
    journal.settle()
    return best


def _standing(session: Session, finalist: Finalist, objectives: Sequence[str]) -> Standing:
    spans = spans_of(finalist.cold.attempt, session.results[finalist.cold.assignment], objectives)
    return Standing(
        candidate_id=finalist.candidate.id, attempt_seq=finalist.cold.seq, spans=spans, gates=finalist.gates
    )


def is_beaten(state: CampaignState, candidate_id: str, by: Sequence[str]) -> bool:
    """Whether one of these was the incumbent that it was slower beside, or given up beside: cold it would only lose again."""
    return any(
        row.attempt.incumbent_id in by
        and row.attempt.speedup is not None
        and (row.attempt.verdict is Verdict.SLOWER or row.attempt.speedup.value < GIVEN_UP)
        for row in state.attempts_of(candidate_id)
    )


def measure_cold(session: Session, candidate: Candidate, incumbent: Candidate) -> Finalist:
    """Each side in a fresh process of its own, interleaved, on inputs never used before; then the first gates.

    On the shape table; by replays where the two differ in settings of the serving loop alone.
    """
    assert session.band is not None
    engine = session.engines[0]
    order = session.order(engine, incumbent, candidate, lowest_tier(candidate, incumbent), Purpose.COLD)
    row = session.settle(order, order.future.result())
    session.view.activity(engine.name, f"gates · {candidate.label}")
    evidence = engine.evidence(candidate, session.seed_of("gates", order.number), session.band.noise_abs)
    session.view.activity(engine.name, "")
    gates = first_gates(
        candidate,
        cold=session.results[order.number],
        cold_attempt=row.attempt,
        agreement=evidence.agreement,
        weights_unchanged=evidence.weights_unchanged,
        band=session.band,
        policy=session.policy,
    )
    return Finalist(
        candidate=candidate,
        cold=row,
        gates={gate.name: gate.text for gate in gates},
        evidence={gate.name: gate.evidence for gate in gates},
    )


def best_of(winners: Sequence[Finalist]) -> Finalist | None:
    """The first, in the search's own order, that no other is surely faster than; None without any.

    The search's incumbent leads that order, so of two that tie it is taken, with settings of the serving loop that no cold
    measurement over the shape table sees; and taking the larger of two like numbers would overstate it.
    """
    spans = [finalist.cold.attempt.speedup for finalist in winners]
    surest = max((span.low for span in spans if span), default=0.0)
    return next((f for f, span in zip(winners, spans, strict=True) if span and span.high >= surest), None)


def _claims(session: Session, finalist: Finalist) -> Claims:
    cold, state = finalist.cold.attempt, session.state
    assert cold.speedup is not None
    assert session.band is not None
    own = next(row.attempt for row in reversed(state.attempts) if row.attempt.purpose is Purpose.AA)
    loaded = Baseline(
        name=LOADED,
        numerics=_class_as_loaded(session),
        speedup_vs_loaded=Estimate(value=1.0, low=1.0, high=1.0, kind=cold.speedup.kind),
        max_abs=own.numerics_measured.get("max_abs", 0.0),
    )
    return claims_of(
        cold.speedup,
        finalist.candidate.numerics,
        cold.numerics_measured.get("max_abs", 0.0),
        session.band.noise_abs,
        loaded,
        [_baseline(row) for row in state.baselines if not row.failure],
    )


def _class_as_loaded(session: Session) -> Numerics:
    """Of the deployment as loaded, relative to the file's own values computed in fp32: a narrow model computes narrowly."""
    return Numerics.BIT_IDENTICAL if session.plan.deployment.model.dtype == "float32" else Numerics.TOLERANCE


def _baseline(row: BaselineRow) -> Baseline:
    return Baseline(
        name=row.name,
        numerics=Numerics(row.numerics),
        speedup_vs_loaded=row.speedup,
        max_abs=row.numerics_measured.get("max_abs", float("inf")),
    )


def result_line(session: Session) -> dict[str, Any]:
    """The one JSON object that ends a campaign, with the keys that programs may rely on."""
    state, plan = session.state, session.plan
    winner = state.winner
    line: dict[str, Any] = {
        "schema": RESULT_SCHEMA,
        "campaign": plan.campaign,
        "deployment": plan.deployment.id,
        "attempts": len(state.search_attempts()),
        "attempts_per_hour": round(state.attempts_per_hour(), 1),
        "best": _best(session) if state.best() else None,
        "gates": dict(winner["gates"]) if winner else dict(state.no_winner.get("gates", {})),
        "verdict": "faster" if state.best() else _verdict_without_winner(state),
    }
    if state.front is not None:
        line["front"] = [_front_member(state, member) for member in state.front]
    if plan.continued:
        line["continued"] = {"from": plan.continued.folder, "shape_distance": plan.continued.shape_distance}
    return json_safe(line)  # type: ignore[no-any-return]


def _best(session: Session) -> dict[str, Any]:
    state = session.state
    assert state.winner is not None
    row = state.best()
    assert row is not None
    cold, claims = row.attempt, state.winner["claims"]
    candidate = session.candidates[cold.candidate_id]
    assert cold.speedup is not None
    return {
        "candidate": candidate.id,
        "label": candidate.label,
        "purpose": cold.purpose,
        "kind": cold.speedup.kind,
        "numerics": candidate.numerics,
        "tokens_per_s": round(cold.tokens_per_second, 3) if cold.tokens_per_second else None,
        "bound_fraction": bound_fraction(session, cold.tokens_per_second),
        "speedup_vs_loaded": _claim(claims["vs_loaded"]),
        "speedup_vs_best_same_class": _claim(claims["vs_best_same_class"]),
        "speedup_vs_best_as_accurate": _claim(claims["vs_best_as_accurate"]),
    }


def _front_member(state: CampaignState, member: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "candidate": member["candidate_id"],
        "label": state.label_of(member["candidate_id"]),
        "gates": dict(member["gates"]),
        **{name: _claim({"estimate": span, "baseline": LOADED}) for name, span in member["spans"].items()},
    }


def _claim(claim: dict[str, Any] | Claim | None) -> dict[str, Any] | None:
    if claim is None:
        return None
    plain = json_safe(claim)
    estimate = plain["estimate"]
    low, high = estimate["low"], estimate["high"]
    return {
        "value": round(estimate["value"], 4),
        "ci95": [
            round(low, 4) if isinstance(low, float | int) else low,
            round(high, 4) if isinstance(high, float | int) else high,
        ],
        "baseline": plain["baseline"],
    }


def bound_fraction(session: Session, rate: float | None) -> float | None:
    """Share of the physical bound: floor of a step over the shape table ÷ its measured time; None where no floor is known."""
    shapes, floors = session.plan.deployment.shapes, session.bounds_ms
    if not rate or not all(row.key in floors for row in shapes.rows):
        return None
    floor_ms = sum(row.steps_share * floors[row.key] for row in shapes.rows)
    return round(floor_ms / (shapes.output_tokens_per_step / rate * 1e3), 4)


def _verdict_without_winner(state: CampaignState) -> str:
    """Of the leading finalist: what its cold measurement said, unless a gate says something graver."""
    gates = state.no_winner.get("gates", {})
    if any(gates.get(name, "").startswith("fail") for name in ("logits", "greedy-agreement")):
        return Verdict.INCORRECT.value
    if gates.get("weights", "").startswith("fail"):
        return Verdict.INVALID.value
    cold = [row.attempt.verdict for row in state.attempts if row.seq == state.no_winner.get("attempt_seq")]
    return cold[0].value if cold and cold[0] is not Verdict.FASTER else Verdict.INCONCLUSIVE.value
