"""`hotpass replay`: the policy again, over what a campaign recorded. The same inputs must give the same decisions.

    log ── events in order ──► state (folded) ──► proposer, shares, rules asked again ──► held against the decisions in the log

Inputs are what came from outside: attempts, what agents and people handed in, clock readings. Decisions are everything that the
search made of them: whose turn it was, what was asked, promoted, installed, given up, why it stopped, and who was measured at the end.
Nothing is measured, and nothing is written. What is not here: measured times and gates themselves, which a replay cannot make again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.briefing import read_briefing
from cluster.desk import CampaignDesk
from cluster.events import Event, read_events
from cluster.finish import choose_finalists
from cluster.folder import all_candidates
from cluster.journal import FOLDER
from cluster.plan import read_plan
from cluster.ports import Proposer
from cluster.predicting import Foresight
from cluster.proposers import proposer_of, unfinished
from cluster.replies import StoredReplies
from cluster.rules import Follow, may_still_lead, needs_wider_cut, reaction_to, stop_reason
from cluster.state import SEARCHING, AttemptRow, CampaignState
from cluster.warm import warm_of
from hotpass.canonical import to_plain
from hotpass.records.candidate import Candidate, PartSource, Proposal
from hotpass.records.measurement import Purpose, Tier
from search.agents.exchange import FOLDER as REPLIES
from search.objectives import parse_objectives
from search.policy import RULES, machine_suspect
from search.proposers import Proposer as Who
from search.proposers import lowest_tier
from search.scheduler import Ready, pick, reload_of

FOLLOWED = {"promote": Follow.PROMOTE, "incumbent": Follow.INSTALL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One decision that would be another one now."""

    seq: int
    """Of its event."""
    decision: str
    recorded: str
    now: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What came of a replay."""

    same: dict[str, int]
    """Decision → how many were found again."""
    differing: tuple[Difference, ...]


def replay(folder: Path, catalogue: Sequence[PartSource]) -> Replayed:
    """`catalogue`: the parts that the campaign knew. Raises InputError for a folder that holds no campaign."""
    again = _Again(folder, catalogue)
    handed_in = []
    for event in read_events(folder / FOLDER):
        again.take(event)
        if event.kind == "proposal" and event.payload["proposer"].startswith("agent:"):
            handed_in.append(event)
    again.end()
    if (folder / REPLIES).is_dir():
        again.replied(handed_in)
    return Replayed(same=dict(sorted(again.same.items())), differing=tuple(again.differing))


class _Again:
    """One pass over the log."""

    def __init__(self, folder: Path, catalogue: Sequence[PartSource]) -> None:
        self.folder = folder
        self.plan, self.briefing, self.catalogue = read_plan(folder), read_briefing(folder), catalogue
        self.candidates = all_candidates(folder)
        self.state = CampaignState()
        spec = self.plan.spec
        self.foresight = Foresight(self.state, self.candidates, spec.seed)
        self.state.shares.control_share = spec.control_share if spec.control != "none" else 0.0
        self.proposer: Proposer | None = None
        self.asked: dict[int, Proposal | None] = {}
        """Turn → what the proposer gave for it, until the log says what it was."""
        self.due: dict[int, Follow] = {}
        """Seq of an attempt → what must follow from it."""
        self.borrowed: list[str] = []
        self.measured: set[int] = set()
        """Assignments that an engine answered."""
        self.same = Counter[str]()
        self.differing: list[Difference] = []

    def take(self, event: Event) -> None:
        """Ask what would be decided now, then fold the event, then learn as the search did."""
        if event.kind == "decision":
            check = getattr(self, f"_{event.payload['decision'].replace('-', '_')}", None)
            if check is not None:
                check(event)
        elif event.kind == "proposal" and "turn" in event.payload:
            expected = self.asked.pop(int(event.payload["turn"]), None)
            self._held(
                event, "proposal", event.payload["candidate_id"], expected.candidate.id if expected else "nothing"
            )
        elif (
            event.kind == "assignment" and event.payload["purpose"] == "search" and event.payload["engine"] != "builder"
        ):
            self._assignment(event)
        elif event.kind == "prediction":
            self._prediction(event)
        elif event.kind == "measurement" and "assignment" in event.payload:
            self.measured.add(int(event.payload["assignment"]))
        known = len(self.state.attempts)
        self.state.apply(event)
        if len(self.state.attempts) > known:
            self._learn(self.state.attempts[-1])
        if event.kind == "proposal" and "turn" not in event.payload and self.proposer is not None:
            self.proposer.seen([self.candidates[event.payload["candidate_id"]]])

    def end(self) -> None:
        for seq, follow in self.due.items():
            self.differing.append(Difference(seq=seq, decision="follow", recorded="nothing", now=follow.value))

    def replied(self, events: Sequence[Event]) -> None:
        """Agents' proposals: a stored reply must give each of them again."""
        catalogue = tuple(self.catalogue)
        stored = StoredReplies(self.folder, CampaignDesk(self.folder, catalogue=lambda device: catalogue))
        for event in events:
            payload = event.payload
            onto = self.candidates.get(payload["parents"][0]) if payload["parents"] else None
            given = onto is not None and stored.gives(payload["candidate_id"], payload["proposer"], onto)
            self._held(event, "reply", payload["candidate_id"], payload["candidate_id"] if given else "nothing")

    def _held(self, event: Event, decision: str, recorded: object, now: object) -> None:
        if recorded == now:
            self.same[decision] += 1
        else:
            self.differing.append(Difference(seq=event.seq, decision=decision, recorded=str(recorded), now=str(now)))

    def _learn(self, row: AttemptRow) -> None:
        attempt = row.attempt
        if self.proposer is None or attempt.candidate_id not in self.candidates:
            return
        candidate = self.candidates[attempt.candidate_id]
        if attempt.purpose is Purpose.AUDIT:  # what was to be left out: the search expects no answer
            self.proposer.give_up(candidate)
        if attempt.purpose not in SEARCHING:
            return
        if row.assignment in self.measured:
            follow = reaction_to(self.state, row).follow
            if follow is Follow.LOOK_AGAIN:
                return
            if follow is not Follow.NOTHING:
                self.due[row.seq] = follow
        elif attempt.reason.startswith("late:"):
            return
        elif "engines were lost" in attempt.reason:
            self.proposer.give_up(candidate)
        self.proposer.tell(candidate, attempt)
        self.borrowed += self.proposer.drain_borrowed()

    def _incumbent_now(self) -> Candidate:
        return self.candidates[self.state.incumbent_id]

    def _prediction(self, event: Event) -> None:
        """What is expected of a candidate, and whether it is left out, follow from the attempts before it."""
        payload, candidate = event.payload, self.candidates.get(event.payload["candidate_id"])
        if candidate is None:
            return
        now = self.foresight.consider(candidate)
        self._held(event, "prediction", _expected(payload), _expected(to_plain(now)))
        if payload["decision"] == "prune" and self.proposer is not None:
            self.proposer.give_up(candidate)

    # One for each decision, named as it is ---------------------------------------------------------------------------

    def _space(self, event: Event) -> None:
        """The first one of a session says that its search begins."""
        if event.payload["previous"] == "":
            self.proposer = proposer_of(
                self.plan,
                self.state,
                self.candidates,
                self.briefing.slots,
                self.catalogue,
                self.briefing.compiler,
                warm_of(self.plan, self.folder),
            )
            self.proposer.seen(p.candidate for p in unfinished(self.plan, self.state, self.candidates).values())
            self.asked.clear()
            self.due.clear()
        version = self.proposer.space_version if self.proposer else "none"
        self._held(event, "space", event.payload["version"], version)

    def _turn(self, event: Event) -> None:
        payload = event.payload
        now = self.state.shares.choose(payload["arms"])
        self._held(event, "turn", payload["arm"], now)
        if payload["candidate_id"] or self.proposer is None:
            return
        incumbent = self._incumbent_now()
        serving = payload["arm"] == Who.SERVING
        ask = self.proposer.ask_serving(incumbent) if serving else self.proposer.ask(incumbent, payload["arm"])
        self.asked[int(payload["turn"])] = ask
        self.borrowed += self.proposer.drain_borrowed()

    def _nothing_left(self, event: Event) -> None:
        expected = self.asked.pop(int(event.payload["turn"]), None)
        self._held(event, "nothing-left", "nothing", expected.candidate.id if expected else "nothing")

    def _borrowed(self, event: Event) -> None:
        now = self.borrowed.pop(0) if self.borrowed else "nothing"
        self._held(event, "borrowed", event.payload["candidate_id"], now)

    def _assignment(self, event: Event) -> None:
        """Who was passed over had to be."""
        payload, incumbent = event.payload, self._incumbent_now()
        names = [*payload.get("before", ()), payload["candidate_id"]]
        if any(name not in self.candidates for name in names):
            return
        waiting = [self._ready(self.candidates[name], incumbent) for name in names]
        waiting[-1] = Ready(candidate=waiting[-1].candidate, tier=Tier(payload["tier"]), reload=waiting[-1].reload)
        running = [
            Ready(
                candidate=self.candidates[order.candidate_id],
                tier=order.tier,
                reload=reload_of(self.candidates[order.candidate_id]),
            )
            for order in self.state.open_orders.values()
            if order.candidate_id in self.candidates
        ]
        index, _ = pick(waiting, running, len(self.state.start.get("engines", ())))
        self._held(event, "order", names[-1], names[index] if index is not None else "nothing")

    def _ready(self, candidate: Candidate, incumbent: Candidate) -> Ready:
        promoted = self.state.fast_speedup(candidate.id) is not None
        tier = Tier.SLOW if promoted else lowest_tier(candidate, incumbent)
        return Ready(candidate=candidate, tier=tier, reload=reload_of(candidate))

    def _promote(self, event: Event) -> None:
        self._followed(event)

    def _incumbent(self, event: Event) -> None:
        self._followed(event)

    def _followed(self, event: Event) -> None:
        decision, seq = event.payload["decision"], int(event.payload["attempt_seq"])
        now = self.due.pop(seq, None)
        if now is None:  # of an earlier session, taken up again
            row = next((row for row in self.state.attempts if row.seq == seq), None)
            now = reaction_to(self.state, row).follow if row else Follow.NOTHING
        self._held(event, decision, FOLLOWED[decision].value, now.value)

    def _passed_over(self, event: Event) -> None:
        leads = may_still_lead(self.state, event.payload["candidate_id"])
        self._held(event, "passed-over", "out", "still in" if leads else "out")

    def _broken(self, event: Event) -> None:
        known = self.proposer.broken if self.proposer else {}
        self._held(event, "broken", event.payload["reason"], known.get(event.payload["what"], "not given up"))

    def _widen(self, event: Event) -> None:
        self._held(event, "widen", "widen", "widen" if needs_wider_cut(self.state) else "leave")

    def _check(self, event: Event) -> None:
        last = [row.attempt for row in self.state.attempts[-RULES.strange_failures :]]
        self._held(event, "check", "check", "check" if machine_suspect(last, self.candidates) else "go on")

    def _stop(self, event: Event) -> None:
        """But for numbers in the sentence: the clock went on between the reason and its record."""
        left = self.proposer.exhausted if self.proposer else ""
        clock = float(event.payload["clock_seconds"])
        now = stop_reason(self.state, self.plan, clock) or left or "nothing is left to try"
        self._held(event, "stop", _without_numbers(event.payload["reason"]), _without_numbers(now))

    def _finalists(self, event: Event) -> None:
        now: Any = choose_finalists(
            self.state, self.plan.pace.num_finalists, parse_objectives(self.plan.spec.objective)
        )
        self._held(event, "finalists", list(event.payload["candidates"]), now)


def _expected(prediction: Mapping[str, Any]) -> str:
    """Decision and expected speedup, to the digits that two machines' arithmetic agrees on."""
    span = prediction["speedup_vs_loaded"]
    return f"{prediction['decision']} at {float(span['value']):.4g}"


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+(?:[.][0-9]+)?", "#", text)
