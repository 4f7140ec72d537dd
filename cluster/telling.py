"""How the campaign's records look to a proposer: plain JSON, short, numbers with their kind. Texts of others are values, never keys.

Pure functions; what is asked and by whom is `cluster.desk`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.report.data import RowTimes
from cluster.state import AttemptRow, CampaignState, CandidateInfo, PostRow
from engines.quick_check import QuickReport
from hotpass.canonical import Json
from hotpass.parts import PartDeclaration
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import Estimate, Purpose, Verdict
from hotpass.records.profile import RowProfile, SlotTime
from hotpass.records.shapes import ShapeRow
from hotpass.records.slots import Slot
from search.board import cleaned

PAGE_LINES, PAGE_CHARS = 400, 16_000
"""Of a source in one answer; the rest is read with `from_line`."""
MAX_REASON = 600
"""Characters of a reason that a candidate may have written itself."""


def page(text: str, from_line: int) -> dict[str, Json]:
    """Whole lines from one on, as many as fit, and where the rest begins (null: nowhere)."""
    lines = text.splitlines()
    shown: list[str] = []
    for line in lines[from_line - 1 :]:
        if shown and (len(shown) >= PAGE_LINES or sum(map(len, shown)) + len(line) > PAGE_CHARS):
            break
        shown.append(line)
    last = from_line - 1 + len(shown)
    return {"text": "\n".join(shown), "lines": len(lines), "next_line": last + 1 if last < len(lines) else None}


def estimate(found: Estimate | None) -> Json:
    if found is None:
        return None
    return {
        "value": round(found.value, 4), "low": round(found.low, 4), "high": round(min(found.high, 1e9), 4), "kind": found.kind,
    }  # fmt: skip


def attempt(row: AttemptRow) -> dict[str, Json]:
    """One attempt; its number is what `evidence` of a post names."""
    found = row.attempt
    return {
        "number": row.seq,
        "tier": found.tier.value,
        "purpose": found.purpose.value,
        "verdict": found.verdict.value,
        "reason": cleaned(found.reason)[:MAX_REASON],
        "speedup_over_loaded": estimate(row.speedup_vs_loaded),
        "speedup_over_incumbent": estimate(found.speedup),
        "incumbent": found.incumbent_id[:10],
        "tokens_per_second": found.tokens_per_second,
        "error": dict(found.numerics_measured),
    }


def best_row(state: CampaignState, candidate_id: str) -> AttemptRow | None:
    """The attempt that says most about a candidate: cold before the latest."""
    rows = [row for row in state.attempts_of(candidate_id) if row.attempt.purpose is not Purpose.AA]
    return max(rows, key=lambda row: (row.attempt.purpose is Purpose.COLD, row.seq), default=None)


def candidate_line(state: CampaignState, info: CandidateInfo) -> dict[str, Json]:
    """A candidate in a list."""
    row = best_row(state, info.candidate_id)
    return {
        "candidate": info.candidate_id[:10],
        "what": info.label[:300],
        "proposer": info.proposer,
        "hypothesis": cleaned(info.hypothesis)[:300],
        "verdict": row.attempt.verdict.value if row else "not measured yet",
        "reason": cleaned(row.attempt.reason)[:200] if row else "",
        "speedup_over_loaded": estimate(row.speedup_vs_loaded) if row else None,
        "is_incumbent": info.candidate_id == state.incumbent_id,
    }


def ranked(state: CampaignState, infos: Sequence[CandidateInfo], order: str) -> list[CandidateInfo]:
    """The incumbent, then the rest by their best evidence over as loaded; or newest first."""
    if order == "latest":
        return list(reversed(infos))

    def value(info: CandidateInfo) -> tuple[bool, float]:
        row = best_row(state, info.candidate_id)
        usable = row is not None and row.attempt.verdict in (Verdict.FASTER, Verdict.SLOWER, Verdict.INCONCLUSIVE)
        ratio = row.speedup_vs_loaded.value if row and usable and row.speedup_vs_loaded else -1.0
        return info.candidate_id == state.incumbent_id, ratio

    return sorted(infos, key=value, reverse=True)


def post(state: CampaignState, row: PostRow) -> dict[str, Json]:
    """A post with what its evidence says by the ledger, not by its author."""
    by_seq = {item.seq: item for item in state.attempts if item.seq in row.post.evidence}
    return {
        "number": row.seq,
        "minutes": round(row.elapsed_seconds / 60, 1),
        "author": row.post.author,
        "kind": row.post.kind.value,
        "text": row.post.text,
        "candidates": [candidate_id[:10] for candidate_id in row.post.candidates],
        "evidence": [
            {
                "number": seq,
                "candidate": by_seq[seq].attempt.candidate_id[:10],
                "verdict": by_seq[seq].attempt.verdict.value,
                "speedup_over_loaded": estimate(by_seq[seq].speedup_vs_loaded),
            }
            for seq in row.post.evidence
            if seq in by_seq
        ],
    }


def part_line(declared: PartDeclaration, name: str, why_not: str) -> dict[str, Json]:
    """A part of the catalogue in a list."""
    return {
        "part": name,
        "summary": " ".join(declared.summary.split("\n\n")[0].split())[:300],
        "claims": list(declared.claims),
        "keeps": list(declared.keeps),
        "domain": declared.domain,
        "params": {key: list(values) for key, values in declared.params.items()},
        "numerics": declared.numerics.value,
        "applies": why_not or "yes",
    }


def slot_line(claim: str, slot: Slot, count: int) -> dict[str, Json]:
    return {
        "claim": claim,
        "class": slot.stands_for,
        "slots": count,
        "forward": f"forward{slot.signature}",
        "judged_by": slot.lowest_tier.value,
    }


def shape_line(
    row: ShapeRow, loaded: Mapping[str, RowTimes], incumbent: Mapping[str, RowTimes], floors: Mapping[str, Any]
) -> dict[str, Json]:
    """One kind of step: how often, how long as loaded and in the incumbent, and the least that the machine allows."""
    floor = floors.get(row.key)
    own, best = loaded.get(row.key), incumbent.get(row.key)
    best_ms = best.candidate_ms if best else None
    return {
        "shape": row.key,
        "phase": row.phase.value,
        "sequences": row.num_seqs,
        "query_tokens": row.query_tokens,
        "context_mean": row.context_mean,
        "context_max": row.context_max,
        "share_of_steps": round(row.steps_share, 4),
        "share_of_output_tokens": round(row.tokens_share, 4),
        "loaded_ms": _rounded(own.incumbent_ms if own else None),
        "incumbent_ms": _rounded(best_ms),
        "floor_ms": _rounded(floor),
        "times_the_floor": round(best_ms / floor, 2) if best_ms and floor else None,
        "layers_run": best.layers if best else None,
    }


def profiled_line(row: RowProfile) -> dict[str, Json]:
    """One row of a profile: the operators that take most, and each kind of slot with its distance from the roofline."""
    kinds: dict[tuple[str, str], list[SlotTime]] = {}
    for slot in row.slots:
        claim = ".".join("*" if piece.isdigit() else piece for piece in slot.slot.split("."))
        kinds.setdefault((claim, slot.stands_for), []).append(slot)
    shown = [_slot_kind(claim, kind, found, row.step_ms) for (claim, kind), found in kinds.items()]
    return {
        "shape": row.row.key,
        "step_ms": _rounded(row.step_ms),
        "share_in_gaps": round(row.gaps_ms / row.profiled_ms, 3) if row.profiled_ms else None,
        "operators": [
            {"operator": item.name, "calls": item.calls, "share": round(item.share, 3)} for item in row.operators[:12]
        ],
        "slots": sorted(shown, key=lambda item: -item["share_by_itself"])[:16],
    }


def _slot_kind(claim: str, kind: str, found: Sequence[SlotTime], step_ms: float) -> dict[str, Json]:
    bound = sum(slot.bound_ms or 0.0 for slot in found)
    total = sum(slot.ms for slot in found)
    return {
        "claim": claim,
        "class": kind,
        "slots": len(found),
        "ms": _rounded(total),
        "share_by_itself": round(sum(slot.self_ms for slot in found) / step_ms, 3) if step_ms else 0.0,
        "times_the_floor": round(total / bound, 2) if bound else None,
    }


def checked(report: QuickReport) -> Json:
    """A quick check, with what the part raised."""
    problem = report.problem
    answer: dict[str, Json] = {
        "looks": "wrong" if problem else "right",
        "problem": problem,
        "note": "a small check of one layer, not the verdict",
        "seconds": round(report.seconds, 1),
        "rows": [
            {
                "shape": row.shape,
                "calls": row.calls,
                "max_abs": float(f"{min(row.max_abs, 1e30):.3g}"),
                "relative": float(f"{min(row.relative_rms, 1e30):.3g}"),
                "loaded_max_abs": float(f"{row.loaded_max_abs:.3g}"),
            }
            for row in report.rows
        ],
    }
    if report.failure is not None and report.failure.detail:
        answer["detail"] = report.failure.detail[-2000:]
    return answer


def sources(candidate: Candidate) -> dict[str, str]:
    """`name/path` → text of every file of its parts."""
    return {f"{use.source.name}/{path}": text for use in candidate.parts for path, text in use.source.files}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
