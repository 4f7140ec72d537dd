"""Whose candidate is taken next, and which of those that are ready an engine gets: bookkeeping and rules, without clock or thread.

    arms (screening, neighbour, optuna, agent:…, mcp:…, person) ─► Shares.choose, take ─► candidate ─► built ─► Ready
    Ready, by tier and reload class ─► pick ─► engine ─► attempt ─► Shares.settle (seconds used, gain earned)

Everything here is a function of the calls made so far, and those follow from the ledger's events, so that a replay decides alike.
What is not here: making candidates (`search.study`, agents), when a tier is deserved (`cluster.rules`), and budgets (`search.budget`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Reload
from hotpass.records.measurement import Attempt, Purpose, Tier, Verdict
from hotpass.settings import reload_of_settings

FLOOR = 0.1
"""Share of the engine time that an arm gets whatever it has earned: what is new, or was unlucky, can still show itself."""
CROWD = 0.5
"""All floors together are at most this, so that among many arms too half of the time goes to those that earn."""
MEMORY = 0.95
"""What an arm has used and earned counts by this factor less with each of its attempts: about its last twenty decide."""
PRIOR_ATTEMPTS = 4
"""So many attempts at the average rate of all arms are counted for each: a newcomer is neither best nor worst."""
CONTROL = "control"
"""The arm of the control search; its share is fixed, and it takes no part in the comparison."""

COSTLY = (Reload.REKV, Reload.RESHARD, Reload.RESTART)
"""Reloads that take an engine much longer than a measurement."""


@dataclass(slots=True, kw_only=True)
class Arm:
    """What one proposer has used and earned."""

    attempts: int = 0
    seconds: float = 0.0
    """Engine seconds, all of them."""
    gain: float = 0.0
    """Sum of sure gains (log of the lower end), those withdrawn taken off."""
    recent_seconds: float = 0.0
    """Discounted by `MEMORY`."""
    recent_gain: float = 0.0
    virtual: float = 0.0
    """Engine time divided by the share that it was taken at: the arm with the least goes next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A turn that an arm was given, not settled yet."""

    arm: str
    seconds: float
    """Engine time that was expected of it, and charged."""
    share: float


@dataclass(slots=True, kw_only=True)
class Shares:
    """A bandit over proposers: turns go by shares, shares by what candidates earned lately. A deterministic one."""

    control_share: float = 0.0
    """Of all engine time, for the arm `CONTROL`."""
    arms: dict[str, Arm] = field(default_factory=dict)
    taken: dict[int, Taken] = field(default_factory=dict)
    """Turns under way, by their number."""
    credited: dict[str, float] = field(default_factory=dict)
    """Candidate id → the gain that its arm was credited with, what a slower or cold verdict takes back; none is left out."""
    present: frozenset[str] = frozenset()
    """Arms that had something at the last choice."""

    def choose(self, waiting: Sequence[str]) -> str:
        """Which of the arms that have something goes next. Changes nothing: `take` does, once that is decided."""
        starts = self._starts(waiting)
        rivals = [name for name in waiting if name != CONTROL or len(waiting) == 1]
        return self._control_is_due(waiting) or min(rivals, key=lambda name: (starts[name], waiting.index(name)))

    def take(self, name: str, waiting: Sequence[str], turn: int) -> None:
        """The arm has this turn; it is charged the time that an attempt takes on average."""
        for other, start in self._starts(waiting).items():
            self.arms.setdefault(other, Arm()).virtual = start
        self.present = frozenset(waiting)
        share, seconds = self.shares(waiting)[name], self._expected()
        self.arms[name].virtual += seconds / share
        self.taken[turn] = Taken(arm=name, seconds=seconds, share=share)

    def give_back(self, turn: int) -> None:
        """Nothing came of this turn."""
        taken = self.taken.pop(turn, None)
        if taken is not None:
            self.arms[taken.arm].virtual -= taken.seconds / taken.share

    def settle(self, turn: int | None, arm: str, attempt: Attempt) -> None:
        """An attempt on a candidate of this arm was judged; `turn` is the one that the candidate was taken in, None for a later look."""
        known = self.arms.setdefault(arm, Arm())
        taken = self.taken.pop(turn, None) if turn is not None else None
        if taken is not None:
            known.virtual += (attempt.seconds - taken.seconds) / taken.share
        gain = self._credit(attempt)
        if attempt.purpose is Purpose.COLD:  # nobody's turn: the end of the campaign measures its finalists
            known.gain += gain
            return
        known.attempts += 1
        known.seconds += attempt.seconds
        known.gain += gain
        known.recent_seconds = known.recent_seconds * MEMORY + attempt.seconds
        known.recent_gain = max(0.0, known.recent_gain * MEMORY + gain)

    def borrow(self, attempt: Attempt) -> None:
        """The control wanted a candidate that was measured for others: it is charged as if it had been measured for it."""
        arm = self.arms.setdefault(CONTROL, Arm())
        arm.attempts += 1
        arm.seconds += attempt.seconds

    def shares(self, waiting: Sequence[str]) -> dict[str, float]:
        """Share of the engine time of each of these arms, from 0 to 1; that of the control is fixed."""
        rivals = [name for name in waiting if name != CONTROL]
        floor = min(FLOOR, CROWD / max(1, len(rivals)))
        rates = {name: self._rate(name) for name in rivals}
        total = sum(rates.values())
        found = {
            name: floor + (1 - floor * len(rivals)) * (rates[name] / total if total else 1 / len(rivals))
            for name in rivals
        }
        return {**found, CONTROL: max(self.control_share, FLOOR)} if CONTROL in waiting else found

    def _rate(self, name: str) -> float:
        """Gain a second lately, drawn towards the average of all arms while little is known."""
        seconds = sum(arm.recent_seconds for arm in self.arms.values())
        average = sum(arm.recent_gain for arm in self.arms.values()) / seconds if seconds else 0.0
        prior, arm = PRIOR_ATTEMPTS * self._expected(), self.arms.get(name, Arm())
        return (arm.recent_gain + prior * average) / (arm.recent_seconds + prior)

    def _expected(self) -> float:
        attempts = sum(arm.attempts for arm in self.arms.values())
        seconds = sum(arm.seconds for arm in self.arms.values())
        return seconds / attempts if seconds > 0 else 1.0

    def _starts(self, waiting: Sequence[str]) -> dict[str, float]:
        """Virtual times. One that had nothing for a while starts where the others are: time that it did not use is not owed to it."""
        known = {name: self.arms[name].virtual if name in self.arms else 0.0 for name in waiting}
        here = [known[name] for name in waiting if name in self.present and name != CONTROL]
        least = min(here, default=0.0)
        return {name: time if name in self.present else max(time, least) for name, time in known.items()}

    def _control_is_due(self, waiting: Sequence[str]) -> str:
        """The control's name while it has had less than its share, counting what is under way."""
        if CONTROL not in waiting or not self.control_share:
            return ""
        under_way = Counter[str]()
        for taken in self.taken.values():
            under_way[taken.arm] += 1
        expected = self._expected()
        own = self.arms.get(CONTROL, Arm()).seconds + under_way[CONTROL] * expected
        every = sum(arm.seconds for arm in self.arms.values()) + under_way.total() * expected
        return CONTROL if own + expected <= self.control_share * (every + expected) else ""

    def _credit(self, attempt: Attempt) -> float:
        """What the attempt adds to what its arm has earned: the sure gain on the fast tier, doubled or withdrawn later."""
        credited = self.credited.get(attempt.candidate_id, 0.0)
        if attempt.purpose is Purpose.COLD:
            gain = credited if attempt.verdict is Verdict.FASTER else -credited
        elif attempt.tier is Tier.SLOW:
            gain = 0.0 if attempt.verdict in (Verdict.FASTER, Verdict.INCONCLUSIVE) else -credited
        else:
            gain = sure_gain(attempt) - credited
        left = max(0.0, credited + gain)
        if left:
            self.credited[attempt.candidate_id] = left
        else:
            self.credited.pop(attempt.candidate_id, None)
        return gain


def sure_gain(attempt: Attempt) -> float:
    """Log of the lower end of the speedup over the incumbent it was paired with; 0 unless it was faster."""
    if attempt.verdict is not Verdict.FASTER or attempt.speedup is None:
        return 0.0
    low = attempt.speedup.low
    return math.log(low) if 1.0 < low < math.inf else 0.0


def arm_of(proposer: str) -> str:
    """The arm that a proposer's engine time is charged to. The sampler's draws by chance are the sampler's."""
    if proposer.startswith(f"{CONTROL}:"):
        return CONTROL
    return {"random": "optuna"}.get(proposer, proposer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A candidate that can be measured now."""

    candidate: Candidate
    tier: Tier
    reload: Reload

    @property
    def lane(self) -> tuple[Tier, Reload]:
        """Tier and reload class: each has a queue of its own length."""
        return (self.tier, self.reload)


def reload_of(candidate: Candidate) -> Reload:
    """The costliest reload among its parts, its settings and its plan."""
    classes = [declaration(use.source).reload for use in candidate.parts]
    classes += [Reload.RESHARD] if candidate.parallelism else []
    return max([reload_of_settings(candidate.settings), *classes], key=lambda kind: kind.rank)


def pick(waiting: Sequence[Ready], running: Sequence[Ready], num_engines: int) -> tuple[int | None, list[int]]:
    """Index of the one that an idle engine gets (None: nothing waits), and of those that it was preferred to though they came before.

    A replay goes first, as long as no more than half of the engines do replays while other work waits; the same bound holds for
    reloads that take long. So neither starves, and neither holds everything up.
    """
    half = max(1, num_engines // 2)
    may_replay = sum(item.tier is Tier.SLOW for item in running) < half
    may_cost = sum(item.reload in COSTLY for item in running) < half
    passed: list[int] = []
    for tier in (Tier.SLOW, Tier.FAST):
        for index, item in enumerate(waiting):
            if item.tier is tier:
                if (tier is Tier.FAST or may_replay) and (item.reload not in COSTLY or may_cost):
                    return index, passed
                passed.append(index)
    return (passed[0], []) if passed else (None, [])


def is_short(waiting: Sequence[Ready], on_the_way: int, wanted: int) -> bool:
    """Whether more should be proposed. One lane counts at most `wanted`; all together hold at most four times as many."""
    if len(waiting) + on_the_way >= 4 * wanted:
        return False
    lanes = Counter(item.lane for item in waiting)
    usable = sum(min(count, wanted) if lane[1] not in COSTLY else min(count, 1) for lane, count in lanes.items())
    return usable + on_the_way < wanted
