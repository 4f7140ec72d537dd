"""What each proposer was worth: its best over time, what it used, what of it held when it was measured cold. Pure but for the HTML.

A proposer is an arm of the scheduler: `screening`, `neighbour`, `optuna`, `agent:<brief>`, `control`, … The control's line is the
answer to what agents were worth: it never sees their parts (`cluster.control`), while they may build on everything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from html import escape

from cluster.live import clock_text
from cluster.report import charts
from cluster.state import AttemptRow, CampaignState
from hotpass.records.measurement import Estimate, Purpose, Verdict
from search.scheduler import CONTROL, arm_of

SHOWN_LINES = len(charts.LINES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """Of one proposer."""

    name: str
    attempts: int
    """Of its candidates, by the search; what the control borrowed counts for it, too."""
    engine_seconds: float
    steps: tuple[tuple[float, float], ...]
    """(campaign seconds, speedup over as loaded) whenever a candidate of its led all its earlier ones, and was faster as loaded."""
    cold: Estimate | None
    """The largest cold speedup over as loaded of a candidate of its that was faster cold; None without one."""

    @property
    def best(self) -> float:
        return self.steps[-1][1] if self.steps else 1.0

    @property
    def cold_gain_per_hour(self) -> float | None:
        """Log of the cold speedup ÷ engine hours that the proposer used; None where nothing of its was confirmed."""
        if self.cold is None or not self.engine_seconds:
            return None
        return math.log(self.cold.value) / self.engine_seconds * 3600


def worths(state: CampaignState) -> list[Worth]:
    """One entry a proposer with an attempt, the most engine time first."""
    rows: dict[str, list[AttemptRow]] = defaultdict(list)
    borrowed = set(state.borrowed)
    for row in state.attempts:
        info = state.candidates.get(row.attempt.candidate_id)
        if info is None or row.attempt.purpose is Purpose.AA:
            continue
        rows[arm_of(info.proposer)].append(row)
        if row.attempt.candidate_id in borrowed and arm_of(info.proposer) != CONTROL:
            rows[CONTROL].append(row)
    return sorted((_worth(name, found) for name, found in rows.items()), key=lambda worth: -worth.engine_seconds)


def _worth(name: str, rows: list[AttemptRow]) -> Worth:
    searched = [row for row in rows if row.attempt.purpose is not Purpose.COLD]
    cold = [
        row.speedup_vs_loaded
        for row in rows
        if row.attempt.purpose is Purpose.COLD and row.attempt.verdict is Verdict.FASTER and row.speedup_vs_loaded
    ]
    return Worth(
        name=name,
        attempts=len(searched),
        engine_seconds=sum(row.attempt.seconds for row in searched),
        steps=_leads(searched),
        cold=max(cold, key=lambda estimate: estimate.value, default=None),
    )


def _leads(rows: list[AttemptRow]) -> tuple[tuple[float, float], ...]:
    best, steps = 1.0, []
    for row in rows:
        found = row.speedup_vs_loaded
        if found is not None and found.low > 1 and found.value > best:
            best = found.value
            steps.append((row.elapsed_seconds, best))
    return tuple(steps)


def proposers_section(state: CampaignState) -> str:
    """Empty before anything was proposed."""
    found = worths(state)
    if not found:
        return ""
    led = [worth for worth in found if worth.steps][:SHOWN_LINES]
    lines = [(worth.name, worth.steps) for worth in led]
    chart = charts.lines(lines, state.elapsed_seconds) if lines else ""
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip("wnnnnnn", _cells(worth), strict=True))
        + "</tr>"
        for worth in found
    )
    heads = (
        "proposer",
        "attempts",
        "engine time",
        "best of the search",
        "reached at",
        "confirmed cold",
        "cold log gain an engine hour",
    )
    head = "".join(f'<th class="{"n" if index else "w"}">{name}</th>' for index, name in enumerate(heads))
    return (
        "<h2>Who proposed what</h2><p class=lead>The best of each proposer over as loaded, over campaign time; what it used of the engines, and "
        "what of it was confirmed cold. Whoever builds on others' parts shares their gain: only the control, which sees no agent's part, is apart.</p>"
        f'{chart}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cells(worth: Worth) -> list[str]:
    gain = worth.cold_gain_per_hour
    return [
        escape(worth.name),
        str(worth.attempts),
        clock_text(worth.engine_seconds),
        f"{worth.best:.2f}×" if worth.steps else "-",
        clock_text(worth.steps[-1][0]) if worth.steps else "-",
        f"{worth.cold.value:.2f}× [{worth.cold.low:.2f}, {worth.cold.high:.2f}]" if worth.cold else "-",
        f"{gain:.1f}" if gain is not None else "-",
    ]
