"""`--warm-start`: the parts of an earlier campaign as further catalogue, and what they were worth there as an order of trying.

    campaign folder, or MLflow ─► parts, their best ratio there, the fastest candidates ─► <campaign>/warm/ ─► space, first asks

Whatever was measured elsewhere (another machine, another traffic) orders candidates and decides nothing: every number is measured
again here. It is copied into the campaign's folder once, so that a resume or a replay needs nothing else.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.journal import read_state
from cluster.plan import Plan, read_plan
from cluster.state import SEARCHING, CampaignState
from cluster.store import load_candidates, read_candidate_folder, save_candidate
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource
from hotpass.records.measurement import Tier

FOLDER = "warm"
WORTH = "worth.json"
MLFLOW = "mlflow:"
MAX_CANDIDATES = 64
"""The fastest of them are taken over: parts that are in none of these were of no use there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warm:
    """What an earlier campaign leaves to this one."""

    where: str
    """The folder, or `mlflow:ID`."""
    candidates: tuple[Candidate, ...]
    """The fastest first."""
    worth: Mapping[str, float]
    """Candidate id → ratio over as loaded there."""

    @property
    def parts(self) -> tuple[PartSource, ...]:
        """Each once, those of the fastest candidate first."""
        return tuple({use.source.sha256: use.source for c in self.candidates for use in c.parts}.values())

    def worth_of(self, sha256: str) -> float:
        """The best ratio of any candidate with that part; 0 for one that is in none."""
        return max(
            (self.worth[c.id] for c in self.candidates if any(use.source.sha256 == sha256 for use in c.parts)),
            default=0.0,
        )


NOTHING = Warm(where="", candidates=(), worth={})


def warm_of(plan: Plan, folder: Path) -> Warm:
    """What the plan starts from, read from the campaign's own folder; taken over first where that was not done yet.

    Raises InputError when there is nothing at the place named.
    """
    if not plan.spec.warm_start:
        return NOTHING
    target = folder / FOLDER
    if not (target / WORTH).is_file():
        _take_over(plan, target)
    worth: dict[str, float] = json.loads((target / WORTH).read_text(encoding="utf-8"))
    known = load_candidates(target)
    ordered = sorted((known[key] for key in worth if key in known), key=lambda c: (-worth[c.id], c.id))
    return Warm(where=plan.spec.warm_start, candidates=tuple(ordered), worth=worth)


def with_parts(catalogue: Sequence[PartSource], warm: Warm) -> list[PartSource]:
    """The catalogue with what it lacks; its own parts keep their place."""
    known = {source.sha256 for source in catalogue}
    return [*catalogue, *(source for source in warm.parts if source.sha256 not in known)]


def _take_over(plan: Plan, target: Path) -> None:
    """Whole or not at all."""
    where = plan.spec.warm_start
    found = _of_mlflow(plan, where) if where.startswith(MLFLOW) else _of_folder(Path(where))
    if not found:
        raise InputError("--warm-start", where, "timed no candidate that could be taken over", "leave the option out")
    temporary = target.with_name(f".{FOLDER}")
    shutil.rmtree(temporary, ignore_errors=True)
    for candidate, _ in found:
        save_candidate(temporary, candidate)
    worth = {candidate.id: ratio for candidate, ratio in found}
    (temporary / WORTH).write_text(json.dumps(worth, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _of_folder(folder: Path) -> list[tuple[Candidate, float]]:
    read_plan(folder)  # says in one sentence when it is no campaign
    state, known = read_state(folder), load_candidates(folder)
    ratios = {key: _ratio(state, key) for key in known if key != AS_LOADED.id}
    ordered = sorted((key for key, ratio in ratios.items() if ratio > 0), key=lambda key: (-ratios[key], key))
    return [(known[key], ratios[key]) for key in ordered[:MAX_CANDIDATES]]


def _ratio(state: CampaignState, candidate_id: str) -> float:
    """Over as loaded by its best fast attempt; 0 when it was never timed."""
    return max(
        (
            row.speedup_vs_loaded.value
            for row in state.attempts_of(candidate_id)
            if row.attempt.tier is Tier.FAST and row.attempt.purpose in SEARCHING and row.speedup_vs_loaded
        ),
        default=0.0,
    )


def _of_mlflow(plan: Plan, where: str) -> list[tuple[Candidate, float]]:
    from cluster.mirrored import fetch_candidates

    if not plan.spec.tracking_uri:
        raise InputError("--warm-start", where, "needs the server that has it", "give --tracking-uri too")
    with tempfile.TemporaryDirectory() as scratch:
        fetched = fetch_candidates(
            plan.spec.tracking_uri, where.removeprefix(MLFLOW), Path(scratch), limit=MAX_CANDIDATES
        )
        dtype = plan.deployment.model.dtype
        return [(read_candidate_folder(folder, dtype=dtype), ratio) for folder, ratio in fetched]
