"""Commands that look at a campaign, running or done: `report`, `candidates`, `ui`. `status` is in `cluster.commands.hindsight`."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.folder import all_candidates
from cluster.journal import read_state
from cluster.live import span
from cluster.plan import read_plan
from cluster.predicting import attribution_of, effects_of, shown
from cluster.state import CampaignState
from cluster.trying import find_candidate
from costmodel.effects import Effects
from hotpass.decode import json_safe
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import Purpose


def report(arguments: argparse.Namespace) -> int:
    from cluster.report import write_report

    print(write_report(Path(arguments.folder)))
    return 0


def ui(arguments: argparse.Namespace) -> int:
    """Runs until Ctrl-C. What a campaign that ended early left unmirrored is mirrored first."""
    from cluster.ui import serve_ui

    return serve_ui(Path(arguments.folder), port=arguments.port)


def candidates(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    plan, state = read_plan(folder), read_state(folder)
    if arguments.diff:
        left, right = (find_candidate(folder, name) for name in arguments.diff)
        sys.stdout.writelines(line + "\n" for line in diff_candidates(left, right))
        return 0
    known = all_candidates(folder)
    rows = [candidate_row(state, candidate) for candidate in known.values()]
    rows.sort(key=lambda row: (not row["winner"], -float(str(row["value"] or 0))))
    learned = effects_of(state, known)
    apart = {key: attributed(state, learned, candidate) for key, candidate in known.items()}
    if arguments.json:
        print(json.dumps(json_safe([{**row, "effects": apart[str(row["id"])]} for row in rows])))
        return 0
    print(f"{plan.campaign} (* the winner; best evidence of each: cold, else the latest)")
    print(f"  {'id':<10}  {'over as loaded':<36} {'verdict':<13} {'numerics':<13} candidate")
    for row in rows:
        mark = "*" if row["winner"] else " "
        print(
            f"{mark} {str(row['id'])[:10]}  {row['speedup']!s:<36} {row['verdict']!s:<13} {row['numerics']!s:<13} {row['label']}"
        )
    leader = state.best_so_far()
    effects = apart.get(leader.attempt.candidate_id, []) if leader else []
    if effects:
        print("\nwhat bought how much of the best (fast tier, effects that add in log time, 90 % intervals):")
        for effect in effects:
            span_ = f"{effect['value']:.3f} [{effect['low']:.3f} {effect['high']:.3f}]"
            print(f"  {span_:<24} {effect['pairs']:>3} pairs  {effect['thing']}")
    return 0


def attributed(state: CampaignState, learned: Effects, candidate: Candidate) -> list[dict[str, str | float]]:
    """Factors on speed of a candidate's parts, parameters and settings, the largest first."""
    found = attribution_of(state, learned, candidate)
    return [
        {
            "thing": shown(effect.thing),
            "value": effect.speedup.value,
            "low": effect.speedup.low,
            "high": effect.speedup.high,
            "pairs": effect.pairs,
        }
        for effect in found.effects
    ]


def candidate_row(state: CampaignState, candidate: Candidate) -> dict[str, object]:
    """A candidate with its best evidence: cold before slow before fast is what a reader wants to see first."""
    attempts = [row for row in state.attempts_of(candidate.id) if row.attempt.purpose is not Purpose.AA]
    shown = max(attempts, key=lambda row: (row.attempt.purpose is Purpose.COLD, row.seq), default=None)
    estimate = shown.speedup_vs_loaded if shown else None
    return {
        "id": candidate.id,
        "label": candidate.label,
        "numerics": candidate.numerics,
        "verdict": shown.attempt.verdict if shown else "-",
        "purpose": shown.attempt.purpose if shown else None,
        "value": estimate.value if estimate else None,
        "speedup": span(estimate),
        "winner": bool(state.winner and state.winner["candidate_id"] == candidate.id),
    }


def diff_candidates(left: Candidate, right: Candidate) -> Iterator[str]:
    """Settings, parameters and sources of two candidates as one unified diff."""
    a, b = texts_of(left), texts_of(right)
    for name in sorted(a.keys() | b.keys()):
        yield from difflib.unified_diff(
            a.get(name, "").splitlines(), b.get(name, "").splitlines(), f"{left.short_id}/{name}", f"{right.short_id}/{name}", lineterm=""
        )  # fmt: skip


def texts_of(candidate: Candidate) -> dict[str, str]:
    """File name → text, with everything that is no source in `candidate`."""
    lines = [f"numerics = {candidate.numerics}"]
    lines += [f"setting {name} = {value}" for name, value in sorted(candidate.settings.items())]
    texts: dict[str, str] = {}
    for use in candidate.parts:
        lines.append(f"part {use.source.name}")
        lines += [f"  {name} = {value}" for name, value in sorted(use.params.items())]
        texts |= {f"{use.source.name}/{path}": text for path, text in use.source.files}
    return {"candidate": "\n".join(lines), **texts}
