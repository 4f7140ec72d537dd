"""What a campaign knows, folded from its events and nothing else. The loop, the live view, the report, the API and `--resume`
all read this one state; none keeps a second account.

    event log ──apply, in order of seq──► CampaignState

Nothing here decides, measures or writes.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.events import Event
from hotpass.decode import from_plain
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict
from search.agents.spend import LlmCall, LlmSpend
from search.board import Post
from search.scheduler import Shares, arm_of
from verification.gates import passed

SEARCHING = (Purpose.SEARCH, Purpose.REMEASURE)
"""Purposes of the search itself: a first look, and the second one after a disturbed first."""

KEPT_RESULTS = (Purpose.AA, Purpose.COLD)
"""Purposes whose measurement summaries are kept; those of the search are read from the log."""

MOST_GATES = 256
"""Different outcomes of gates that are kept once for all attempts; where reasons are in them there is no end of them."""

UNITY = Estimate(value=1.0, low=1.0, high=1.0)
"""As loaded over as loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateInfo:
    """What people read about a candidate; its sources are in `candidates/<id>/`."""

    candidate_id: str
    label: str
    numerics: str
    proposer: str
    parents: tuple[str, ...]
    hypothesis: str
    parts: tuple[str, ...]
    """Names of its parts."""
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An assignment that was handed to an engine."""

    assignment: int
    candidate_id: str
    incumbent_id: str
    tier: Tier
    purpose: Purpose
    engine: str
    session: int
    """Which session of the campaign gave it; one of an earlier session never gets an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    """An attempt as acknowledged."""

    seq: int
    assignment: int
    elapsed_seconds: float
    """Campaign time at which it was acknowledged."""
    attempt: Attempt
    speedup_vs_loaded: Estimate | None
    """Chained through the incumbents; None unless timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What was expected of a candidate before it was measured: of the prediction, what later questions need."""

    decision: str
    """`measure`, `prune` or `audit`."""
    value: float
    """Speedup over the deployment as loaded."""
    low: float
    high: float
    """Of its 90 % interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineRow:
    """A baseline measured in this session, paired with the deployment as loaded."""

    name: str
    numerics: str
    speedup: Estimate
    """Over the deployment as loaded."""
    tokens_per_second: float
    numerics_measured: Mapping[str, float]
    failure: str
    """Why it could not be measured; empty when it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IncumbentStep:
    """A change of incumbent."""

    elapsed_seconds: float
    candidate_id: str
    speedup_vs_loaded: Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class PostRow:
    """A post on the board, as recorded."""

    seq: int
    elapsed_seconds: float
    post: Post


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts over attempts, kept up to date by `add`."""

    judged: set[int] = field(default_factory=set)
    """Assignments that have an attempt."""
    attempts: int = 0
    """All but A/A."""
    searched: int = 0
    """Of the search itself."""
    engine_seconds: float = 0.0
    """Of those."""
    own_seconds: float = 0.0
    """Of the latest A/A; 0 before one."""
    fast_since_incumbent: int = 0
    """Fast attempts of the search since the incumbent changed (or the search began)."""
    fast_since_serving: int = 0
    """The same since that or since the last replay."""
    rejected: Counter[str] = field(default_factory=Counter)
    """By verdict, those that are not faster."""
    fastest: AttemptRow | None = None
    """The one with the largest speedup over as loaded among those that were faster."""

    def add(self, row: AttemptRow) -> None:
        attempt = row.attempt
        self.judged.add(row.assignment)
        if attempt.purpose is Purpose.AA:
            self.own_seconds = attempt.seconds
            return
        self.attempts += 1
        if attempt.tier is Tier.SLOW:
            self.fast_since_serving = 0
        if attempt.purpose in SEARCHING:
            self.searched += 1
            self.engine_seconds += attempt.seconds
            self.fast_since_incumbent += attempt.tier is Tier.FAST
            self.fast_since_serving += attempt.tier is Tier.FAST
        if attempt.verdict is not Verdict.FASTER:
            self.rejected[attempt.verdict.value] += 1
        elif self.fastest is None or _value_vs_loaded(row) > _value_vs_loaded(self.fastest):
            self.fastest = row


@dataclass(slots=True, kw_only=True)
class CampaignState:
    """The fold. Only `apply` changes it."""

    last_seq: int = 0
    elapsed_seconds: float = 0.0
    """Campaign time: budget used, over all sessions."""
    candidates: dict[str, CandidateInfo] = field(default_factory=dict)
    open_orders: dict[int, Order] = field(default_factory=dict)
    """Assignments without an attempt yet, by number."""
    num_assignments: int = 0
    attempts: list[AttemptRow] = field(default_factory=list)
    by_candidate: dict[str, list[AttemptRow]] = field(default_factory=dict)
    """The same attempts by candidate id, in order."""
    tally: Tally = field(default_factory=lambda: Tally())
    """Counts over the attempts, so that no turn of a long search goes through all of them."""
    shares: Shares = field(default_factory=Shares)
    """Engine time by proposer: used, earned, and whose turn is next."""
    borrowed: list[str] = field(default_factory=list)
    """Candidates that the control wanted after others had had them measured."""
    num_turns: int = 0
    turns: dict[str, int] = field(default_factory=dict)
    """Candidate id → the turn that it was taken in, until its first attempt."""
    widened: int = 0
    """How often the fast tier's cuts were made deeper."""
    attempts_when_widened: int = 0
    """Attempts before that."""
    baselines: list[BaselineRow] = field(default_factory=list)
    incumbents: list[IncumbentStep] = field(default_factory=list)
    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Measurement summaries (without blocks) of A/A and cold assignments by number: what later readers ask for."""
    decisions: Counter[str] = field(default_factory=Counter)
    build_seconds: float = 0.0
    """Of builders, by the wall clock."""
    build_core_seconds: float = 0.0
    """Of processors, in builders and in what they started."""
    broken: dict[str, str] = field(default_factory=dict)
    """What is not tried any more (a part, a parameter's or a setting's value) → how its candidates failed."""
    predictions: dict[str, Expectation] = field(default_factory=dict)
    """By the latest `prediction` (`cluster.predicting.Prediction`), by candidate id."""
    pruned_in_a_row: int = 0
    audit_beat: str = ""
    """The first candidate that was to be left out, was measured all the same, and was faster; empty without one."""
    posts: list[PostRow] = field(default_factory=list)
    llm_spend: dict[str, LlmSpend] = field(default_factory=dict)
    """Author → what its LLM calls cost."""
    llm_outcomes: Counter[str] = field(default_factory=Counter)
    """How LLM calls ended."""
    note_ids: set[str] = field(default_factory=set)
    """Of posts and calls that are counted."""
    stop_reason: str = ""
    finalists: tuple[str, ...] = ()
    winner: Mapping[str, Any] | None = None
    """The `winner` decision: candidate, gates, the cold attempt; None before it."""
    no_winner: Mapping[str, Any] = field(default_factory=dict)
    """The `no-winner` decision: the leading finalist and the gates that stopped it; empty without one."""
    front: Sequence[Mapping[str, Any]] | None = None
    """Of two objectives, the finalists (`cluster.front.Standing`, as plain values) that no other one beats in both, measured cold; None
    before they were, and with one objective."""
    result: Mapping[str, Any] | None = None
    """The JSON line that ends the campaign; None before it."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """The latest `start` decision: engines, slot table version, start-up phases."""
    _gates: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Outcomes of gates so far, each once."""

    def apply(self, event: Event) -> None:
        """Fold one event. Kinds that say nothing about the campaign's standing are passed over."""
        self.last_seq = event.seq
        self.elapsed_seconds = max(self.elapsed_seconds, float(event.payload.get("elapsed_seconds", 0.0)))
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event.payload)

    def _on_proposal(self, payload: Mapping[str, Any]) -> None:
        info = CandidateInfo(
            candidate_id=sys.intern(payload["candidate_id"]),
            label=payload["label"],
            numerics=payload["numerics"],
            proposer=payload["proposer"],
            parents=tuple(payload["parents"]),
            hypothesis=payload["hypothesis"],
            parts=tuple(part["name"] for part in payload["parts"]),
            settings=payload["settings"],
        )
        self.candidates.setdefault(info.candidate_id, info)
        if "turn" in payload:
            self.turns[info.candidate_id] = int(payload["turn"])

    def _on_prediction(self, payload: Mapping[str, Any]) -> None:
        candidate_id = sys.intern(payload["candidate_id"])
        span = payload["speedup_vs_loaded"]
        value, low, high = (from_plain(float, span[name]) for name in ("value", "low", "high"))
        self.predictions[candidate_id] = Expectation(decision=payload["decision"], value=value, low=low, high=high)
        is_pruned = payload["decision"] == "prune"
        self.pruned_in_a_row = self.pruned_in_a_row + 1 if is_pruned else 0
        turn = self.turns.pop(candidate_id, None) if is_pruned else None
        if turn is not None:
            self.shares.give_back(turn)

    def _on_assignment(self, payload: Mapping[str, Any]) -> None:
        number = int(payload["assignment"])
        self.num_assignments = max(self.num_assignments, number + 1)
        self._count_builds([payload["build"]] if "build" in payload else [])
        self.open_orders[number] = Order(
            assignment=number,
            candidate_id=payload["candidate_id"],
            incumbent_id=payload["incumbent_id"],
            tier=Tier(payload["tier"]),
            purpose=Purpose(payload["purpose"]),
            engine=payload["engine"],
            session=self.decisions["start"],
        )

    def _on_measurement(self, payload: Mapping[str, Any]) -> None:
        if "baseline" in payload:
            self.baselines = [row for row in self.baselines if row.name != payload["baseline"]]
            self.baselines.append(
                BaselineRow(
                    name=payload["baseline"],
                    numerics=payload["numerics"],
                    speedup=from_plain(Estimate, payload["speedup"]) if payload["speedup"] else UNITY,
                    tokens_per_second=float(payload["tokens_per_second"] or 0.0),
                    numerics_measured=payload["numerics_measured"],
                    failure=payload["failure"],
                )
            )
        else:
            number = int(payload["assignment"])
            order = self.open_orders.get(number)
            if order is None or order.purpose in KEPT_RESULTS:
                self.results[number] = {k: v for k, v in payload["result"].items() if k not in ("blocks", "replays")}

    def _on_attempt(self, payload: Mapping[str, Any]) -> None:
        number = int(payload["assignment"])
        self.open_orders.pop(number, None)
        if number in self.tally.judged:
            return
        estimate = payload["speedup_vs_loaded"]
        attempt = self._shared(from_plain(Attempt, payload["attempt"]))
        loaded = from_plain(Estimate, estimate) if estimate else None
        row = AttemptRow(
            seq=self.last_seq,
            assignment=number,
            elapsed_seconds=float(payload["elapsed_seconds"]),
            attempt=attempt,
            speedup_vs_loaded=attempt.speedup if loaded == attempt.speedup else loaded,
        )
        self.attempts.append(row)
        self.by_candidate.setdefault(row.attempt.candidate_id, []).append(row)
        self.tally.add(row)
        if row.attempt.purpose is Purpose.AUDIT and row.attempt.verdict is Verdict.FASTER and not self.audit_beat:
            self.audit_beat = row.attempt.candidate_id
        info = self.candidates.get(row.attempt.candidate_id)
        if info is not None and row.attempt.purpose is not Purpose.AA:
            self.shares.settle(self.turns.pop(info.candidate_id, None), arm_of(info.proposer), row.attempt)

    def _shared(self, attempt: Attempt) -> Attempt:
        """The same attempt; what it has in common with thousands of others (ids, outcomes of gates) are the same objects, too."""
        key = tuple(attempt.gates.items())
        gates = self._gates.get(key, attempt.gates)
        if len(self._gates) < MOST_GATES:
            self._gates[key] = gates
        candidate_id, incumbent_id = sys.intern(attempt.candidate_id), sys.intern(attempt.incumbent_id)
        return replace(attempt, candidate_id=candidate_id, incumbent_id=incumbent_id, gates=gates)

    def _on_post(self, payload: Mapping[str, Any]) -> None:
        content = self._noted(payload)
        if content is not None:
            post = from_plain(Post, content)
            self.posts.append(PostRow(seq=self.last_seq, elapsed_seconds=float(payload["elapsed_seconds"]), post=post))

    def _on_reply(self, payload: Mapping[str, Any]) -> None:
        content = self._noted(payload)
        if content is not None:
            call = from_plain(LlmCall, content)
            self.llm_spend[call.author] = self.llm_spend.get(call.author, LlmSpend()).plus(call)
            self.llm_outcomes[call.outcome] += 1

    def _noted(self, payload: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a note says, or None when it was counted before."""
        if payload["note_id"] in self.note_ids:
            return None
        self.note_ids.add(payload["note_id"])
        return {key: value for key, value in payload.items() if key not in ("note_id", "elapsed_seconds")}

    def _on_decision(self, payload: Mapping[str, Any]) -> None:
        name = payload["decision"]
        self.decisions[name] += 1
        if name == "start":
            self.start = payload
            self._count_builds(payload.get("builds", ()))
            for turn in list(self.shares.taken):  # whoever had them is gone with the session before
                self.shares.give_back(turn)
            self.turns.clear()
        elif name == "turn":
            self._on_turn(payload)
        elif name == "nothing-left":
            self.shares.give_back(int(payload["turn"]))
        elif name == "borrowed":
            self.borrowed.append(payload["candidate_id"])
            self.shares.borrow(self.by_candidate[payload["candidate_id"]][0].attempt)
        elif name == "widen":
            self.widened += 1
            self.attempts_when_widened = len(self.attempts)
        elif name == "incumbent":
            step = IncumbentStep(
                elapsed_seconds=float(payload["elapsed_seconds"]),
                candidate_id=payload["candidate_id"],
                speedup_vs_loaded=from_plain(Estimate, payload["speedup_vs_loaded"]),
            )
            self.incumbents.append(step)
            self.tally.fast_since_incumbent = self.tally.fast_since_serving = 0
        elif name == "broken":
            self.broken[payload["what"]] = payload["reason"]
        elif name == "stop":
            self.stop_reason = payload["reason"]
        elif name == "finalists":
            self.finalists = tuple(payload["candidates"])
        elif name == "winner":
            self.winner = payload
        elif name == "no-winner":
            self.no_winner = payload
        elif name == "front":
            self.front = payload["candidates"]
        elif name == "result":
            self.result = payload["result"]

    def _count_builds(self, costs: Iterable[Mapping[str, float]]) -> None:
        for cost in costs:
            self.build_seconds += cost["seconds"]
            self.build_core_seconds += cost["core_seconds"]

    def _on_turn(self, payload: Mapping[str, Any]) -> None:
        turn = int(payload["turn"])
        self.num_turns = max(self.num_turns, turn + 1)
        self.shares.take(payload["arm"], payload["arms"], turn)
        if payload["candidate_id"]:
            self.turns[payload["candidate_id"]] = turn

    @property
    def incumbent_id(self) -> str:
        return self.incumbents[-1].candidate_id if self.incumbents else AS_LOADED.id

    @property
    def lead(self) -> Estimate:
        """Of the present incumbent, over the deployment as loaded."""
        return self.incumbents[-1].speedup_vs_loaded if self.incumbents else UNITY

    def speedup_of(self, candidate_id: str) -> Estimate | None:
        """Of a candidate that others are measured against, over the deployment as loaded; None when it was never timed."""
        if candidate_id == AS_LOADED.id:
            return UNITY
        for step in reversed(self.incumbents):
            if step.candidate_id == candidate_id:
                return step.speedup_vs_loaded
        return self.fast_speedup(candidate_id)

    def fast_speedup(self, candidate_id: str) -> Estimate | None:
        """Over as loaded, by its latest timed fast-tier attempt of the search."""
        for row in reversed(self.attempts_of(candidate_id)):
            if row.attempt.tier is Tier.FAST and row.attempt.purpose in SEARCHING and row.speedup_vs_loaded:
                return row.speedup_vs_loaded
        return None

    def label_of(self, candidate_id: str) -> str:
        info = self.candidates.get(candidate_id)
        return info.label if info else (AS_LOADED.label if candidate_id == AS_LOADED.id else candidate_id[:10])

    def search_attempts(self) -> list[AttemptRow]:
        """Attempts that count as such: every judged candidate but A/A."""
        return [row for row in self.attempts if row.attempt.purpose is not Purpose.AA]

    def attempts_of(self, candidate_id: str) -> list[AttemptRow]:
        return self.by_candidate.get(candidate_id, [])

    def best(self) -> AttemptRow | None:
        """The one best there is, everywhere: the winner's cold attempt, with an explicit pass of every gate and a finite speedup and interval.

        Command line, API, MLflow and release all ask here. None before that; `best_so_far` says where a search stands.
        """
        if self.winner is None or not passed(self.winner["gates"]):
            return None
        row = next((row for row in self.attempts if row.seq == self.winner["attempt_seq"]), None)
        if row is None or row.attempt.verdict is not Verdict.FASTER or row.attempt.purpose is not Purpose.COLD:
            return None
        loaded = row.speedup_vs_loaded
        return row if loaded is not None and all(map(math.isfinite, (loaded.value, loaded.low, loaded.high))) else None

    def best_so_far(self) -> AttemptRow | None:
        """The attempt of the candidate that leads: the best once there is one, else the fastest found. No claim before that."""
        best = self.best()
        if best is not None:
            return best
        return self.tally.fastest

    def rejected(self) -> Counter[str]:
        """Attempts by verdict that cannot be used: incorrect, invalid, failed, slower, inconclusive."""
        return +self.tally.rejected

    def attempts_per_hour(self) -> float:
        return self.tally.attempts / self.elapsed_seconds * 3600 if self.elapsed_seconds else 0.0


def fold(events: Iterable[Event]) -> CampaignState:
    """The state after all events, in order."""
    state = CampaignState()
    for event in events:
        state.apply(event)
    return state


def chain(over_incumbent: Estimate, incumbent: Estimate) -> Estimate:
    """Product of two independent ratios; half widths add in quadrature on the log scale (delta method)."""
    if incumbent == UNITY:
        return over_incumbent
    value = over_incumbent.value * incumbent.value
    kind = over_incumbent.kind if over_incumbent.kind == incumbent.kind else "predicted"
    down = math.hypot(_log(over_incumbent.value, over_incumbent.low), _log(incumbent.value, incumbent.low))
    up = math.hypot(_log(over_incumbent.high, over_incumbent.value), _log(incumbent.high, incumbent.value))
    return Estimate(
        value=value, low=value * math.exp(-down), high=value * math.exp(up), level=over_incumbent.level, kind=kind
    )


def inverse(estimate: Estimate) -> Estimate:
    """One over a ratio."""
    return Estimate(
        value=1 / estimate.value,
        low=1 / estimate.high if math.isfinite(estimate.high) else 0.0,
        high=1 / estimate.low if estimate.low > 0 else math.inf,
        level=estimate.level,
        kind=estimate.kind,
    )


def _log(high: float, low: float) -> float:
    return math.log(high / low) if low > 0 and math.isfinite(high) else math.inf


def _value_vs_loaded(row: AttemptRow) -> float:
    return row.speedup_vs_loaded.value if row.speedup_vs_loaded else 0.0
