"""What follows from failures: which things are not tried again, and when the machine is to blame rather than the candidates.

    attempts, candidates ─► breakers          families of equal failures, and what their candidates have in common
                         └► machine_suspect   failures in a row with nothing in common

Pure functions of the ledger's records, the same today and in a replay. A reason that a candidate wrote only groups failures that
read alike; it never decides anything else. What is not here: promotion and adoption (`cluster.rules`), choosing candidates
(`search.study`), budgets (`search.budget`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hotpass.canonical import canonical_json
from hotpass.records.candidate import Candidate, PartSource
from hotpass.records.measurement import Attempt, Purpose, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The constants of the policy."""

    equal_failures: int = 3
    """Distinct candidates with one thing in common and equal failures after which that thing is not tried again."""
    strange_failures: int = 6
    """Failures in a row that have nothing in common after which the machine is checked."""


RULES = Rules()


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
