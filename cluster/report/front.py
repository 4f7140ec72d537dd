"""The report's section on two objectives: every candidate by both, the Pareto front of the search, and what of it was measured cold."""

from __future__ import annotations

import math
from html import escape

from cluster.front import search_front, values_of
from cluster.plan import Plan
from cluster.report import charts
from cluster.state import CampaignState
from hotpass.decode import from_plain
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Estimate
from search.objectives import OBJECTIVES, parse_objectives


def front_section(plan: Plan, state: CampaignState) -> str:
    """Empty with one objective, and before anything was timed."""
    objectives = parse_objectives(plan.spec.objective)
    every = values_of(state, objectives).every
    if len(objectives) < 2 or len(every) < 2:
        return ""
    front = search_front(state, objectives)
    dots = [
        charts.Dot(
            x=math.exp(first),
            y=math.exp(second),
            colour=charts.GREEN if key in front else charts.GREY,
            text=f"{state.label_of(key)}: {math.exp(first):.2f}×, {math.exp(second):.2f}×",
        )
        for key, (first, second) in every.items()
        if key != AS_LOADED.id
    ]
    meaning = "; ".join(f"{name}: {escape(OBJECTIVES[name])}" for name in objectives)
    return (
        "<h2>Two objectives</h2><p class=lead>Ratios over the deployment as loaded, above 1 where the candidate is better. "
        f"{meaning}. Point estimates of the search; green: nobody is better in both. The first objective alone decides what is promoted "
        "and what wins.</p>" + charts.scatter(dots, objectives[0], objectives[1]) + _cold(state, objectives)
    )


def _cold(state: CampaignState, objectives: tuple[str, ...]) -> str:
    """Who of the front was measured cold; empty before that."""
    if state.front is None:
        return ""
    best = state.best()
    rows = []
    for member in state.front:
        spans = [from_plain(Estimate, member["spans"][name]) for name in objectives]
        cells = [f"{span.value:.3f}× [{span.low:.3f}, {span.high:.3f}]" for span in spans]
        wins = "the winner" if best is not None and best.attempt.candidate_id == member["candidate_id"] else ""
        row = [escape(state.label_of(member["candidate_id"])), *cells, wins]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    if not rows:
        return "<p class=lead>Nothing of it was sound and surely better in one of them when measured cold.</p>"
    head = "".join(f"<th>{name}</th>" for name in ("measured cold", *objectives, ""))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
