"""What follows from an attempt, when a candidate becomes the incumbent, and when a search stops: pure functions of the state.

The loop acts by them and `hotpass replay` asks them again, so nothing here looks at a clock or draws by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.plan import Plan
from cluster.state import SEARCHING, AttemptRow, CampaignState
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Estimate, Tier, Verdict
from search.budget import Budget, Spent, parse_duration, reason_to_stop
from verification.verdict import CLOCKS, DISTURBED

PATIENCE_SHARE = 0.5
"""Stop when this share of the search's time brought no new incumbent (and at least `PATIENCE_ATTEMPTS` were tried)."""
PATIENCE_ATTEMPTS = 60

SERVING_EVERY = 8
"""Fast attempts between two tries of a setting of the serving loop: a replay costs as much as several of them."""
SERVING_ALONE_SECONDS = 900.0
"""Least budget in which the serving loop of a single client is looked at: only the chunks of its prompts can differ there."""

DECISIVE = 1.25
"""A first candidate whose whole interval is beyond this replaces the deployment as loaded on the fast tier's word: a replay of the
slow original costs as much as a dozen attempts against its successor, and could not turn such a verdict."""


MIN_PAIRS = 6
"""Pairs of candidates that both tiers tell apart, before their agreement says anything."""
LEAST_TAU = 0.5
"""Kendall's tau over those pairs below which the fast tier's cuts are made deeper: three pairs of four agree."""
COMPARED = 50
"""Latest candidates with both tiers that are compared."""


class Follow(StrEnum):
    """What may follow from an attempt."""

    NOTHING = "nothing"
    LOOK_AGAIN = "look again"
    """It was disturbed: once more, before anybody is told."""
    PROMOTE = "promote"
    INSTALL = "install"
    """It is the new incumbent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reaction:
    """What does follow from one."""

    follow: Follow
    why: str = ""
    """For `INSTALL`."""


def reaction_to(state: CampaignState, row: AttemptRow) -> Reaction:
    """`row` is the latest attempt of the state, or an earlier one that nothing followed yet."""
    if deserves_second_look(state, row):
        return Reaction(follow=Follow.LOOK_AGAIN)
    if row.attempt.tier is Tier.SLOW:
        if not becomes_incumbent(state, row):
            return Reaction(follow=Follow.NOTHING)
        served = state.fast_speedup(row.attempt.candidate_id) is None
        faster, not_slower = (
            "faster on the slow tier, which alone can tell",
            "faster on the fast tier, and not slower on the slow one",
        )
        return Reaction(follow=Follow.INSTALL, why=faster if served else not_slower)
    if not deserves_slow_tier(state, row):
        return Reaction(follow=Follow.NOTHING)
    if decides_alone(state, row):
        return Reaction(follow=Follow.INSTALL, why="decisively faster than as loaded on the fast tier")
    return Reaction(follow=Follow.PROMOTE)


def may_still_lead(state: CampaignState, candidate_id: str) -> bool:
    """Whether a promoted candidate that waits for the slow tier could become the incumbent: the lead may have grown since."""
    fast = state.fast_speedup(candidate_id)
    return fast is None or fast.value > state.lead.value


def tau_between_tiers(state: CampaignState) -> tuple[float | None, int]:
    """Kendall's tau of fast and slow tier over pairs of candidates that both tell apart, and how many pairs those are.

    A pair is told apart where the intervals over as loaded do not meet: the few replays of the slow tier leave most pairs open, and
    these say nothing about the cuts. Only attempts since the cuts were last made deeper count.
    """
    fast: dict[str, Estimate] = {}
    slow: dict[str, Estimate] = {}
    for row in state.attempts[state.attempts_when_widened :]:
        if row.attempt.purpose in SEARCHING and row.speedup_vs_loaded is not None:
            (fast if row.attempt.tier is Tier.FAST else slow)[row.attempt.candidate_id] = row.speedup_vs_loaded
    both = [candidate_id for candidate_id in slow if candidate_id in fast][-COMPARED:]
    signs = [(_order(fast[a], fast[b]), _order(slow[a], slow[b])) for index, a in enumerate(both) for b in both[:index]]
    told = [x * y for x, y in signs if x and y]
    return (sum(told) / len(told) if told else None), len(told)


def needs_wider_cut(state: CampaignState) -> bool:
    """Whether the fast tier ranks so unlike the slow one that its cuts should be deeper."""
    tau, pairs = tau_between_tiers(state)
    return tau is not None and pairs >= MIN_PAIRS and tau < LEAST_TAU


def _order(a: Estimate, b: Estimate) -> int:
    return 1 if a.low > b.high else -1 if a.high < b.low else 0


def decides_alone(state: CampaignState, row: AttemptRow) -> bool:
    """Whether a fast-tier attempt needs no slow tier: the first step away from the deployment as loaded, and a large one."""
    first = not state.incumbents and row.attempt.incumbent_id == AS_LOADED.id
    return first and row.attempt.speedup is not None and row.attempt.speedup.low > DECISIVE


def deserves_slow_tier(state: CampaignState, row: AttemptRow) -> bool:
    """A fast-tier attempt that is faster than the incumbent it was paired with, and leads everything measured so far."""
    if row.attempt.verdict is not Verdict.FASTER or row.speedup_vs_loaded is None:
        return False
    return row.speedup_vs_loaded.value > state.lead.value


def deserves_second_look(state: CampaignState, row: AttemptRow) -> bool:
    """An attempt that was disturbed, of a candidate that had no second look yet: on a shared machine that is seldom its own fault."""
    if row.attempt.verdict is not Verdict.INVALID or not row.attempt.reason.startswith((DISTURBED, CLOCKS)):
        return False
    looks = [r for r in state.attempts_of(row.attempt.candidate_id) if r.attempt.tier is row.attempt.tier]
    return len(looks) == 1


def serving_is_due(state: CampaignState, plan: Plan, *, nothing_else: bool) -> bool:
    """Whether the slow tier should try the incumbent with another setting of the serving loop.

    Only where there is time for replays: with several clients, or a long budget. Then when the incumbent stood against
    `SERVING_EVERY` candidates of the fast tier since it came or since the last replay, or when `nothing_else` is left to try.
    """
    if not state.incumbents or (plan.deployment.concurrency == 1 and plan.spec.budget_seconds < SERVING_ALONE_SECONDS):
        return False
    return nothing_else or state.tally.fast_since_serving >= SERVING_EVERY


def becomes_incumbent(state: CampaignState, row: AttemptRow) -> bool:
    """A slow-tier attempt that is not slower, of a candidate that the fast tier still puts ahead of the present incumbent.

    The slow tier has a veto, not the casting vote: its few replays decide large effects only, and their spread is no evidence
    against a gain that the fast tier measured with a narrow interval. What differs from the incumbent in settings of the serving
    loop alone has no fast tier: there the slow tier must say faster.
    """
    fast = state.fast_speedup(row.attempt.candidate_id)
    if fast is None:
        return row.attempt.verdict is Verdict.FASTER and row.attempt.incumbent_id == state.incumbent_id
    if row.attempt.verdict not in (Verdict.FASTER, Verdict.INCONCLUSIVE):
        return False
    return fast.value > state.lead.value


def stop_reason(state: CampaignState, plan: Plan, clock_seconds: float) -> str:
    """Empty while the search should go on. Part of the budget is kept for the finalists (`Pace.reserve_seconds`)."""
    spec, search_seconds = plan.spec, plan.spec.budget_seconds - plan.pace.reserve_seconds
    budget = Budget(
        wall_seconds=search_seconds,
        engine_seconds=parse_duration(spec.engine_budget, "engine_budget") if spec.engine_budget else 0.0,
        attempts=spec.max_attempts,
        target_speedup=spec.target_speedup,
        idle_attempts=1 if spec.patience else PATIENCE_ATTEMPTS,
        idle_seconds=parse_duration(spec.patience, "patience") if spec.patience else PATIENCE_SHARE * search_seconds,
    )
    return reason_to_stop(budget, spent(state, clock_seconds))


def spent(state: CampaignState, clock_seconds: float) -> Spent:
    """What the search has used and reached, over all sessions."""
    since = state.incumbents[-1].elapsed_seconds if state.incumbents else 0.0
    return Spent(
        wall_seconds=clock_seconds,
        engine_seconds=state.tally.engine_seconds,
        attempts=state.tally.searched,
        speedup_low=state.lead.low,
        idle_attempts=state.tally.fast_since_incumbent,
        idle_seconds=clock_seconds - since,
    )
