"""What the report shows, gathered from a campaign folder and nothing else: plan, folded log, blocks of the measurements, sources.

Everything is computed from recorded numbers; nothing is measured or looked up here.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.events import Event, read_events
from cluster.folder import all_candidates
from cluster.journal import FOLDER
from cluster.plan import Plan, read_plan
from cluster.predicting import Attribution, Trust, attribution_of, effects_of, trust_of
from cluster.release import REFERENCES, reference_name
from cluster.state import SEARCHING, AttemptRow, CampaignState, fold
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.measurement import Estimate, Purpose, Tier, Verdict
from hotpass.records.shapes import ShapeRow
from hotpass.stats import kendall_tau


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTimes:
    """Step time of one row of the shape table, geometric mean over the windows of one measurement."""

    row: ShapeRow
    incumbent_ms: float
    candidate_ms: float
    floor_ms: float | None
    layers: int
    """Depth that was run; the model's own unless it was a cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartGain:
    """What one part did alone, and the best composition that it is in."""

    name: str
    alone: Estimate | None
    """The part as the only one, over as loaded; None when it was never timed so."""
    best: Estimate | None
    """Of the best candidate that has it, over as loaded."""
    attempts: int
    in_winner: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceDiff:
    """A source of the winner as a diff against what it replaces."""

    title: str
    against: str
    """What the left side is."""
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything that the page shows."""

    folder: Path
    plan: Plan
    state: CampaignState
    shown: AttemptRow | None
    """The attempt that the page is about: the winner's cold one, else the leading one."""
    candidate: Candidate | None
    rows: tuple[RowTimes, ...]
    """Of the shown attempt's measurement."""
    gains: tuple[PartGain, ...]
    taken_apart: Attribution | None
    """The shown candidate by what each of its parts bought; None without one, or without a part."""
    trust: Trust
    """How what was expected fared."""
    diffs: tuple[SourceDiff, ...]
    tau: float | None
    """Kendall's tau between the tiers over candidates that both have timed; None with fewer than three."""
    tau_pairs: int
    environment: Mapping[str, Any]
    """Of the shown measurement: hardware, threads, versions."""
    noise_floor: float | None
    kind: str
    """`measured`, or `simulated` for the fake engine."""


def gather(folder: Path) -> ReportData:
    """Raises InputError when the folder is no campaign."""
    plan = read_plan(folder)
    events = list(read_events(folder / FOLDER))
    state = fold(events)
    shown = state.best_so_far()
    candidates = all_candidates(folder)
    candidate = candidates.get(shown.attempt.candidate_id) if shown else None
    result = _result_of(events, shown.assignment) if shown else {}
    tau, pairs = tier_agreement(state)
    own = [row for row in state.attempts if row.attempt.purpose is Purpose.AA]
    first = state.results.get(own[-1].assignment, {}) if own else {}
    return ReportData(
        folder=folder,
        plan=plan,
        state=state,
        shown=shown,
        candidate=candidate,
        rows=tuple(row_times(result.get("blocks", ()), plan, state.start.get("floors_ms", {}))),
        gains=tuple(part_gains(state, candidate)),
        taken_apart=attribution_of(state, effects_of(state, candidates), candidate)
        if candidate and candidate != AS_LOADED
        else None,
        trust=trust_of(state),
        diffs=tuple(source_diffs(candidate, folder)) if candidate else (),
        tau=tau,
        tau_pairs=pairs,
        environment=result.get("environment") or first.get("environment") or {},
        noise_floor=first.get("noise_floor"),
        kind="simulated" if plan.spec.engine == "fake" else "measured",
    )


def row_times(blocks: Iterable[Mapping[str, Any]], plan: Plan, floors_ms: Mapping[str, float]) -> list[RowTimes]:
    """One entry a row of the shape table that was measured, at the greatest depth that was run."""
    times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    keys = {row.key: row for row in plan.deployment.shapes.rows}
    by_content = {(r.phase.value, r.num_seqs, r.query_tokens, r.context_mean): r.key for r in keys.values()}
    for block in blocks:
        row = block["row"]
        key = by_content.get((row["phase"], row["num_seqs"], row["query_tokens"], row["context_mean"]))
        if key is not None:
            pair = (_geometric(block["incumbent_ms"]), _geometric(block["candidate_ms"]))
            times[key, int(block["layers"])].append(pair)
    found = []
    for key, row in keys.items():
        depths = [depth for known, depth in times if known == key]
        if depths:
            pairs = times[key, max(depths)]
            found.append(
                RowTimes(
                    row=row,
                    incumbent_ms=_geometric([pair[0] for pair in pairs]),
                    candidate_ms=_geometric([pair[1] for pair in pairs]),
                    floor_ms=floors_ms.get(key),
                    layers=max(depths),
                )
            )
    return found


def part_gains(state: CampaignState, winner: Candidate | None) -> list[PartGain]:
    """One entry a part or setting that was tried, the most useful first."""
    winning = _things([use.source.name for use in winner.parts], winner.settings) if winner else set()
    alone: dict[str, Estimate] = {}
    best: dict[str, Estimate] = {}
    tried: dict[str, int] = defaultdict(int)
    for row in state.search_attempts():
        info = state.candidates.get(row.attempt.candidate_id)
        if info is None or row.attempt.tier is not Tier.FAST or row.attempt.purpose is Purpose.COLD:
            continue
        things = _things(info.parts, info.settings)
        for thing in things:
            tried[thing] += 1
            if row.speedup_vs_loaded is None:
                continue
            if len(things) == 1:
                alone[thing] = _larger(alone.get(thing), row.speedup_vs_loaded)
            best[thing] = _larger(best.get(thing), row.speedup_vs_loaded)
    gains = [
        PartGain(name=name, alone=alone.get(name), best=best.get(name), attempts=count, in_winner=name in winning)
        for name, count in tried.items()
    ]
    return sorted(gains, key=lambda gain: -(gain.alone.value if gain.alone else 0.0))


def _things(parts: Iterable[str], settings: Mapping[str, Any]) -> set[str]:
    return set(parts) | {f"{name}={value}" for name, value in settings.items()}


def _larger(a: Estimate | None, b: Estimate) -> Estimate:
    return b if a is None or b.value > a.value else a


def tier_agreement(state: CampaignState) -> tuple[float | None, int]:
    """Kendall's tau of fast and slow speedups over the same incumbent, and over how many candidates."""
    slow: dict[tuple[str, str], float] = {}
    fast: dict[tuple[str, str], float] = {}
    for row in state.search_attempts():
        attempt = row.attempt
        if attempt.speedup is not None and attempt.purpose in SEARCHING:
            (slow if attempt.tier is Tier.SLOW else fast)[attempt.candidate_id, attempt.incumbent_id] = (
                attempt.speedup.value
            )
    both = [key for key in slow if key in fast]
    if len(both) < 3:
        return None, len(both)
    return kendall_tau([fast[key] for key in both], [slow[key] for key in both]), len(both)


def source_diffs(candidate: Candidate, folder: Path) -> list[SourceDiff]:
    """Each file of each part; `part.py` against the reference of the slots that it claims, where the campaign kept that."""
    from hotpass.parts import declaration

    diffs = []
    for use in candidate.parts:
        claims = declaration(use.source).claims
        reference = "\n".join(_reference(folder, claim) for claim in claims).strip("\n")
        for path, text in use.source.files:
            against = reference if path == "part.py" else ""
            lines = difflib.unified_diff(
                against.splitlines(), text.splitlines(), ", ".join(claims) if against else "(nothing)", f"{use.source.name}/{path}", lineterm="", n=3
            )  # fmt: skip
            title = f"{use.source.name}/{path}"
            diffs.append(SourceDiff(title=title, against=", ".join(claims) if against else "", lines=tuple(lines)))
    return diffs


def _reference(folder: Path, claim: str) -> str:
    path = folder / REFERENCES / reference_name(claim)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def rejected_rows(state: CampaignState) -> list[AttemptRow]:
    """Attempts that brought nothing, the gravest first, then by time."""
    order = [Verdict.INCORRECT, Verdict.INVALID, Verdict.FAILED, Verdict.SLOWER, Verdict.INCONCLUSIVE]
    rows = [row for row in state.search_attempts() if row.attempt.verdict is not Verdict.FASTER]
    return sorted(rows, key=lambda row: (order.index(row.attempt.verdict), row.seq))


def _result_of(events: Iterable[Event], assignment: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    for event in events:
        if event.kind == "measurement" and event.payload.get("assignment") == assignment:
            found = event.payload["result"]
    return found


def _geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
