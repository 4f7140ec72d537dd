"""What follows from the attempts so far: pure functions of the ledger's records, the same today and in a replay.

    attempts ─► standings ─► promotable (fast ► slow: a race over intervals)
             └─► adoptable (slow: faster, gates passed)      ─► next_decision ─► Decision (a record of the log)
             └─► breakers (families of equal failures)

Numbers decide, never texts that a candidate wrote: a reason only groups failures that read alike. What is not here: choosing
candidates (`search.study`), measuring, and clocks: the caller hands in its reading.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from hotpass.canonical import canonical_json
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource
from hotpass.records.measurement import Attempt, Purpose, Tier, Verdict


class Action(StrEnum):
    """What a decision decides."""

    PROPOSE = "propose"
    """Measure another candidate on the fast tier."""
    PROMOTE = "promote"
    """Measure this one on the slow tier."""
    ADOPT = "adopt"
    """This one is the incumbent from now on."""
    CHECK = "check"
    """Measure the incumbent against itself before anything else: the machine may be broken, not the candidates."""
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The constants of the policy."""

    jump: float = 1.10
    """A lower bound this far above the incumbent goes to the slow tier at once."""
    patience: int = 4
    """Fast attempts since the last slow one after which any promising candidate goes, so that the slow tier never starves."""
    equal_failures: int = 3
    """Distinct candidates with one thing in common and equal failures after which that thing is not tried again."""
    strange_failures: int = 6
    """Failures in a row that have nothing in common after which the machine is checked."""


RULES = Rules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One decision, with all that it was made from: replaying the same attempts gives the same record."""

    action: Action
    candidate_id: str
    """Empty for propose, check and stop."""
    reason: str
    last_seq: int
    """Of the last event that was seen."""
    random_state: str
    """Of the generator that later draws use, as text; empty when nothing is drawn."""
    clock_seconds: float
    """Campaign time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a candidate stands on the fast tier, over the deployment as loaded, log scale."""

    candidate_id: str
    value: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Breaker:
    """One thing that candidates have in common and that is not tried again."""

    part_sha256: str
    """Empty when a setting is to blame."""
    name: str
    """Parameter of the part, or setting; empty when the whole part is to blame."""
    value_json: str
    """Of the parameter or setting, canonical JSON; empty with `name`."""
    family: str
    """What the failures have in common: verdict and reason without numbers."""
    candidates: tuple[str, ...]
    """Ids that failed so."""


def standings(attempts: Iterable[Attempt]) -> dict[str, Standing]:
    """Candidate → its latest timed fast attempt of the search, chained through incumbents; as loaded stands at 0."""
    found = {
        AS_LOADED.id: Standing(candidate_id=AS_LOADED.id, value=0.0, low=0.0, high=0.0, verdict=Verdict.INCONCLUSIVE)
    }
    for attempt in attempts:
        base = found.get(attempt.incumbent_id)
        speedup = attempt.speedup
        if base is None or speedup is None or attempt.tier is not Tier.FAST or attempt.purpose is Purpose.AA:
            continue
        value, low, high = _log(speedup.value), _log(speedup.low), _log(speedup.high)
        if all(map(math.isfinite, (value, low, high))):
            # The value of the incumbent is common to all that are measured against it, so its own interval is left out here.
            found[attempt.candidate_id] = Standing(
                candidate_id=attempt.candidate_id,
                value=base.value + value,
                low=base.value + low,
                high=base.value + high,
                verdict=attempt.verdict,
            )
    return found


def promotable(attempts: Sequence[Attempt], incumbent_id: str) -> list[Standing]:
    """Candidates for the slow tier, the surest first.

    In: verdict faster, lower bound above the incumbent, not on the slow tier yet. Out of the race: whose upper bound lies below the
    lower bound of another that is in.
    """
    known = standings(attempts)
    lead = known[incumbent_id].value if incumbent_id in known else 0.0
    tried = {attempt.candidate_id for attempt in attempts if attempt.tier is Tier.SLOW}
    waiting = [
        standing
        for standing in known.values()
        if standing.verdict is Verdict.FASTER
        and standing.low > lead
        and standing.candidate_id not in {*tried, incumbent_id}
    ]
    surest = max((standing.low for standing in waiting), default=-math.inf)
    return sorted((s for s in waiting if s.high >= surest), key=lambda s: (-s.low, s.candidate_id))


def adoptable(attempts: Sequence[Attempt], incumbent_id: str) -> Attempt | None:
    """The slow attempt whose candidate should be the incumbent: faster than the present one, every gate that it names passed."""
    found = [
        attempt
        for attempt in attempts
        if attempt.tier is Tier.SLOW
        and attempt.incumbent_id == incumbent_id
        and attempt.verdict is Verdict.FASTER
        and attempt.purpose in (Purpose.SEARCH, Purpose.REMEASURE)
        and gates_hold(attempt)
    ]
    return max(found, key=lambda attempt: attempt.speedup.low if attempt.speedup else 0.0, default=None)


def gates_hold(attempt: Attempt) -> bool:
    """True when at least one gate was run and each of them passed. A gate that was not run is no pass."""
    return bool(attempt.gates) and all(said == "pass" for said in attempt.gates.values())


def breakers(attempts: Iterable[Attempt], candidates: Mapping[str, Candidate], rules: Rules = RULES) -> list[Breaker]:
    """What to stop trying. The thing in common that explains most failures is blamed first, and explains them alone.

    A thing that was ever in a candidate that was timed is never blamed.
    """
    failures: dict[str, dict[str, frozenset[_Thing]]] = defaultdict(dict)
    innocent: set[_Thing] = set()
    for attempt in attempts:
        candidate = candidates.get(attempt.candidate_id)
        if candidate is None:
            continue
        if attempt.verdict.is_timed:
            innocent |= _things(candidate)
        elif attempt.verdict in (Verdict.FAILED, Verdict.INCORRECT):
            failures[_family(attempt)][candidate.id] = _things(candidate)
    found = []
    for family, failed in sorted(failures.items()):
        left = dict(failed)
        while len(left) >= rules.equal_failures:
            count: dict[_Thing, int] = defaultdict(int)
            for things in left.values():
                for thing in things - innocent:
                    count[thing] += 1
            blamed = max(count, key=lambda thing: (count[thing], -thing.narrowness, thing.key), default=None)
            if blamed is None or count[blamed] < rules.equal_failures:
                break
            ids = tuple(sorted(candidate_id for candidate_id, things in left.items() if blamed in things))
            found.append(
                Breaker(
                    part_sha256=blamed.part_sha256,
                    name=blamed.name,
                    value_json=blamed.value_json,
                    family=family,
                    candidates=ids,
                )
            )
            left = {candidate_id: things for candidate_id, things in left.items() if candidate_id not in ids}
    return found


def machine_suspect(attempts: Sequence[Attempt], candidates: Mapping[str, Candidate], rules: Rules = RULES) -> bool:
    """True when the last attempts all failed or were invalid, and no part is in all of them."""
    last = [attempt for attempt in attempts if attempt.purpose is not Purpose.AA][-rules.strange_failures :]
    if len(last) < rules.strange_failures or any(a.verdict not in (Verdict.FAILED, Verdict.INVALID) for a in last):
        return False
    parts = [
        {_sha256(use.source) for use in candidates[a.candidate_id].parts} for a in last if a.candidate_id in candidates
    ]
    return not parts or not set.intersection(*parts)


def next_decision(
    attempts: Sequence[Attempt],
    candidates: Mapping[str, Candidate],
    incumbent_id: str,
    *,
    stop: str,
    exhausted: bool,
    last_seq: int,
    random_state: str,
    clock_seconds: float,
    rules: Rules = RULES,
) -> Decision:
    """The next thing to do: adopt a proven winner, then check a strange machine, then stop, promote, or propose.

    `stop` is the reason to stop (`search.budget`), empty without one; `exhausted`: there is nothing left to propose.
    """

    def decision(action: Action, reason: str, candidate_id: str = "") -> Decision:
        return Decision(
            action=action,
            candidate_id=candidate_id,
            reason=reason,
            last_seq=last_seq,
            random_state=random_state,
            clock_seconds=clock_seconds,
        )

    winner = adoptable(attempts, incumbent_id)
    if winner is not None and winner.speedup is not None:
        return decision(Action.ADOPT, f"slow tier: {winner.speedup.value:.3f} times the incumbent", winner.candidate_id)
    if stop:
        return decision(Action.STOP, stop)
    since_check = _since(attempts, lambda attempt: attempt.purpose is Purpose.AA)
    if machine_suspect(since_check, candidates, rules):
        return decision(Action.CHECK, f"{rules.strange_failures} failures in a row with no part in common")
    waiting = promotable(attempts, incumbent_id)
    if waiting:
        known = standings(attempts)
        gain = waiting[0].low - (known[incumbent_id].value if incumbent_id in known else 0.0)
        since_slow = len(_since(attempts, lambda attempt: attempt.tier is Tier.SLOW))
        if gain >= math.log(rules.jump) or since_slow >= rules.patience or exhausted:
            reason = (
                f"fast tier: at least {math.exp(gain):.3f} times the incumbent, {since_slow} attempts since the last"
            )
            return decision(Action.PROMOTE, reason, waiting[0].candidate_id)
    if exhausted:
        return decision(Action.STOP, "nothing is left to propose")
    return decision(Action.PROPOSE, "the fast tier is free")


@dataclass(frozen=True, slots=True)
class _Thing:
    """A part, a parameter's value or a setting's value, as what candidates may have in common."""

    part_sha256: str
    name: str
    value_json: str

    @property
    def narrowness(self) -> int:
        """The whole part before one of its values, and that before a setting."""
        return 2 if not self.part_sha256 else 1 if self.name else 0

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.part_sha256, self.name, self.value_json)


@lru_cache(maxsize=1024)
def _sha256(source: PartSource) -> str:
    return source.sha256


def _things(candidate: Candidate) -> frozenset[_Thing]:
    things = set()
    for use in candidate.parts:
        sha = _sha256(use.source)
        things.add(_Thing(sha, "", ""))
        things |= {_Thing(sha, name, canonical_json(value)) for name, value in use.params.items()}
    things |= {_Thing("", name, canonical_json(value)) for name, value in candidate.settings.items()}
    return frozenset(things)


def _family(attempt: Attempt) -> str:
    """Failures that read alike but for numbers and addresses are one family."""
    return f"{attempt.verdict.value}: {re.sub(r'0x[0-9a-f]+|[0-9]+(?:[.][0-9]+)?(?:e[-+]?[0-9]+)?', '#', attempt.reason)[:120]}"


def _since(attempts: Sequence[Attempt], marks: Callable[[Attempt], bool]) -> list[Attempt]:
    """Attempts after the last one that marks, all when none does."""
    last = max((index for index, attempt in enumerate(attempts) if marks(attempt)), default=-1)
    return list(attempts[last + 1 :])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
