"""What a finished campaign says on stderr: the winner, its speedups by denominator, the gates, and where the rest is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cluster.journal import read_state
from cluster.live import clock_text, span
from cluster.plan import Plan, read_plan
from cluster.state import CampaignState
from hotpass.records.measurement import Purpose

CLAIMS = {
    "speedup_vs_loaded": "over as loaded",
    "speedup_vs_best_same_class": "over the best baseline of its class",
    "speedup_vs_best_as_accurate": "over the best baseline as accurate",
}


def print_notes(plan: Plan) -> None:
    for note in plan.notes:
        print(f"hotpass · {note}", file=sys.stderr)


def print_summary(folder: Path) -> None:
    """A table of what was found; plain when stderr is no terminal."""
    from rich.console import Console
    from rich.table import Table

    plan, state = read_plan(folder), read_state(folder)
    console = Console(stderr=True, highlight=False)
    table = Table(
        show_header=False,
        box=None,
        padding=(0, 2),
        title=f"{plan.deployment.model.name} · {plan.deployment.traffic.name} · {plan.deployment.hardware.name}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column(style="dim")
    table.add_column()
    for key, value in summary_rows(state, plan):
        table.add_row(key, value)
    console.print(table)
    files = [name for name in ("report.html", "result.json", "release") if (folder / name).exists()]
    console.print(f"  [dim]written[/dim]  {folder}: {', '.join(files)}")


def summary_rows(state: CampaignState, plan: Plan) -> list[tuple[str, str]]:
    """(what, value) in the order in which people ask."""
    result: dict[str, Any] = dict(state.result or {})
    rows = [("verdict", str(result.get("verdict", "not finished")))]
    best = result.get("best")
    if best:
        rows.append(("winner", f"{best['label']}  ({best['candidate'][:10]}, {best['numerics']})"))
        for key, words in CLAIMS.items():
            claim = best[key]
            text = (
                f"{claim['value']:.2f} × [{claim['ci95'][0]:.2f}, {claim['ci95'][1]:.2f}]  {claim['baseline']}"
                if claim
                else "no such baseline"
            )
            rows.append((words, text + (f"  ({best['kind']})" if best["kind"] != "measured" else "")))
        rows.append(("tokens/s", f"{best['tokens_per_s']:.1f}" if best["tokens_per_s"] else "-"))
        if best["bound_fraction"] is not None:
            rows.append(("of the physical bound", f"{best['bound_fraction']:.0%}"))
    rows += [(f"gate {name}", text) for name, text in result.get("gates", {}).items()]
    own = [row for row in state.attempts if row.attempt.purpose is Purpose.AA]
    if own:
        rows.append(("A/A", span(own[-1].attempt.speedup)))
    rows += [(f"baseline {row.name}", row.failure or span(row.speedup)) for row in state.baselines]
    rows.append(
        (
            "attempts",
            f"{len(state.search_attempts())} in {clock_text(state.elapsed_seconds)} ({state.attempts_per_hour():.0f}/h)",
        )
    )
    rejected = ", ".join(f"{count} {why}" for why, count in state.rejected().most_common())
    rows.append(("rejected", rejected or "none"))
    rows.append(("search ended", state.stop_reason))
    return rows
