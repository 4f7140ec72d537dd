"""What people watch while a campaign runs, on stderr: a table that redraws itself in a terminal, a line every few seconds elsewhere.

Everything shown comes from the folded state; nothing here is remembered for another purpose. A view never raises into the loop.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from cluster.plan import Plan
from cluster.ports import Silent, View
from cluster.state import CampaignState
from hotpass.records.measurement import Estimate, Purpose, Verdict

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

LINE_SECONDS = 5.0
RECENT = 6
MARKS = {
    Verdict.FASTER: ("▲", "green"),
    Verdict.SLOWER: ("▽", "yellow"),
    Verdict.INCONCLUSIVE: ("=", "cyan"),
    Verdict.INCORRECT: ("✗", "red"),
    Verdict.INVALID: ("!", "magenta"),
    Verdict.FAILED: ("✗", "red"),
}


def make_view(plan: Plan, *, quiet: bool) -> View:
    """On stderr: redrawn in a terminal, lines elsewhere, nothing when quiet."""
    stream = sys.stderr
    if quiet:
        return Silent()
    return TerminalView(plan, stream) if stream.isatty() else LineView(plan, stream)


def span(estimate: Estimate | None) -> str:
    """`1.42 × [1.40, 1.45]`, and its kind when it was not measured."""
    if estimate is None:
        return "-"
    high = f"{estimate.high:.2f}" if estimate.high < 1000 else "∞"
    text = f"{estimate.value:.2f} × [{estimate.low:.2f}, {high}]"
    return text if estimate.kind == "measured" else f"{text} {estimate.kind}"


def clock_text(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class LineView:
    """One line every few seconds, when there is something new to say."""

    def __init__(self, plan: Plan, stream: TextIO) -> None:
        self.plan = plan
        self.stream = stream
        self._last = -LINE_SECONDS
        self._told = 0

    def changed(self, state: CampaignState) -> None:
        now = time.monotonic()
        if len(state.attempts) == self._told or now - self._last < LINE_SECONDS:
            return
        self._last, self._told = now, len(state.attempts)
        self._say(status_line(state, self.plan))

    def activity(self, engine: str, text: str) -> None:
        if text.startswith(("loading", "baseline", "gates", "waiting")):
            self._say(f"{engine}: {text}")

    def note(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Nothing is held."""

    def _say(self, text: str) -> None:
        print(f"hotpass · {text}", file=self.stream, flush=True)


def status_line(state: CampaignState, plan: Plan) -> str:
    """As `1:20 of 5:00 · 14 attempts (630/h) · best 3.10 × [3.05, 3.15] cpp-model · rejected 2 incorrect, 1 failed`."""
    best = state.best_so_far()
    parts = [
        f"{clock_text(state.elapsed_seconds)} of {clock_text(plan.spec.budget_seconds)}",
        f"{len(state.search_attempts())} attempts ({state.attempts_per_hour():.0f}/h)",
    ]
    if best is not None:
        parts.append(f"best {span(best.speedup_vs_loaded)} {state.label_of(best.attempt.candidate_id)}")
    if state.rejected():
        parts.append("rejected " + ", ".join(f"{count} {why}" for why, count in state.rejected().most_common()))
    return " · ".join(parts)


class TerminalView:
    """A panel that rich redraws in place; opened by the first change, closed with the process's last word (`close`)."""

    def __init__(self, plan: Plan, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.plan = plan
        self.console: Console = Console(file=stream, stderr=stream is sys.stderr)
        self._lock = threading.Lock()
        self._state = CampaignState()
        self._engines: dict[str, tuple[str, float]] = {}
        self._opened = time.monotonic()
        self._live: Live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def changed(self, state: CampaignState) -> None:
        self._state = state

    def activity(self, engine: str, text: str) -> None:
        with self._lock:
            self._engines[engine] = (text, time.monotonic())

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]{text}[/yellow]", highlight=False)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        with self._lock:
            engines = dict(self._engines)
        try:
            return panel(self._state, self.plan, engines, time.monotonic())
        except RuntimeError:
            # The loop appended to a list that is being read: the next redraw, a quarter of a second later, shows it.
            return panel(CampaignState(), self.plan, engines, time.monotonic())


def panel(state: CampaignState, plan: Plan, engines: Mapping[str, tuple[str, float]], now: float) -> RenderableType:
    """The whole live view of one moment. `engines`: name → what it does, since when (monotonic seconds)."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    budget = plan.spec.budget_seconds
    left = max(0.0, budget - state.elapsed_seconds)
    top = Table.grid(expand=True, padding=(0, 1))
    top.add_column(ratio=1)
    top.add_column(justify="right")
    top.add_row(
        ProgressBar(total=budget, completed=min(state.elapsed_seconds, budget)),
        f"{clock_text(left)} left · {len(state.search_attempts())} attempts · {state.attempts_per_hour():.0f}/h",
    )
    best = state.best_so_far()
    leading = Text("best     ", style="bold")
    if best is None:
        leading.append("nothing faster than as loaded yet", style="dim")
    else:
        leading.append(span(best.speedup_vs_loaded), style="bold green")
        leading.append(f"  {state.label_of(best.attempt.candidate_id)}")
        if best.attempt.purpose is Purpose.COLD:
            leading.append("  cold", style="cyan")
    rejected = Text("rejected ", style="bold")
    rejected.append(", ".join(f"{count} {why}" for why, count in state.rejected().most_common()) or "none", style="dim")
    work = Table.grid(padding=(0, 2))
    for name, (text, since) in engines.items():
        work.add_row(
            Text(name, style="bold"),
            Text(text or "idle", style="" if text else "dim"),
            f"{now - since:.0f} s" if text else "",
        )
    title = f"[bold]hotpass[/bold] · {plan.deployment.model.name} · {plan.deployment.traffic.name} · {plan.deployment.hardware.name}"
    return Panel(
        Group(top, leading, rejected, Text(""), work, Text(""), recent(state)), title=title, title_align="left"
    )


def recent(state: CampaignState) -> RenderableType:
    """The latest attempts, the newest first."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), expand=False)
    for row in reversed(state.search_attempts()[-RECENT:]):
        attempt = row.attempt
        mark, colour = MARKS[attempt.verdict]
        said = span(row.speedup_vs_loaded) if attempt.verdict.is_timed else attempt.reason[:70]
        table.add_row(
            Text(f"{mark} {attempt.verdict}", style=colour),
            Text(attempt.tier.value if attempt.purpose is not Purpose.COLD else "cold", style="dim"),
            Text(said),
            Text(state.label_of(attempt.candidate_id)[:60], style="dim"),
        )
    return table
