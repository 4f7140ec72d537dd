"""The Python API: campaigns from scripts and notebooks, running or done.

    campaign = hp.compile(model="smollm2-135m", traffic="chat", budget="5m")        # or background=True
    campaign.best, campaign.attempts(), campaign.plot(), campaign.report()

A `Campaign` is a view of a campaign folder: it reads the event log each time it is asked, so it is as fresh as the log, also while
another process writes it. What is not here: anything that the command line cannot do too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.campaign import Interrupted, Running, run_campaign
from cluster.events import writer_of
from cluster.journal import FOLDER, read_state
from cluster.live import make_view
from cluster.plan import Plan, read_plan
from cluster.resolve import resolve
from cluster.spec import make_spec
from cluster.state import AttemptRow, CampaignState
from cluster.trying import Tried, find_candidate, make_wanted, try_candidate
from hotpass.decode import from_plain
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import Estimate, Purpose

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas

__all__ = ["Best", "Campaign", "Tried", "compile", "open_campaign", "try_part"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """A candidate with its evidence: the best (purpose `cold`, every gate passed), or where a search stands (`Campaign.leading`)."""

    candidate_id: str
    label: str
    numerics: str
    purpose: Purpose
    speedup_vs_loaded: Estimate
    tokens_per_second: float | None
    gates: Mapping[str, str]
    """Empty before the finalists were measured cold."""
    spans: Mapping[str, Estimate] = field(default_factory=dict)
    """Objective → ratio over the deployment as loaded; empty but in `Campaign.front`."""


class Campaign:
    """A campaign folder, and the thread that runs it when it was started with `background=True`."""

    def __init__(self, folder: str | Path) -> None:
        """Raises InputError when the folder is no campaign."""
        self.folder = Path(folder)
        self.plan: Plan = read_plan(self.folder)
        self._thread: threading.Thread | None = None
        self._running: Running | None = None
        self._error: BaseException | None = None

    @property
    def state(self) -> CampaignState:
        """Everything that the log says now."""
        return read_state(self.folder)

    @property
    def status(self) -> str:
        """`running`, `done` or `stopped` (resumable)."""
        if self.result is not None:
            return "done"
        if self._thread is not None and self._thread.is_alive():
            return "running"
        return "running" if writer_of(self.folder / FOLDER) is not None else "stopped"

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The JSON line of a finished campaign."""
        return self.state.result

    @property
    def best(self) -> Best | None:
        """The winner: measured cold, with an explicit pass of every gate. None before that, and when nothing was proven faster."""
        state = self.state
        return self._shown(state, state.best())

    @property
    def leading(self) -> Best | None:
        """Where the search stands: no claim unless it is the best. None while nothing is faster than as loaded."""
        state = self.state
        return self._shown(state, state.best_so_far())

    @property
    def front(self) -> tuple[Best, ...]:
        """With two objectives: who was measured cold, is sound, and is beaten by no other in both; the best is the one that leads by the
        first objective. Empty before that, and with one objective."""
        state = self.state
        rows = {row.seq: row for row in state.attempts}
        found = []
        for member in state.front or ():
            shown = self._shown(state, rows[int(member["attempt_seq"])])
            if shown is not None:
                spans = {name: from_plain(Estimate, span) for name, span in member["spans"].items()}
                found.append(replace(shown, gates=dict(member["gates"]), spans=spans))
        return tuple(found)

    def _shown(self, state: CampaignState, row: AttemptRow | None) -> Best | None:
        if row is None or row.speedup_vs_loaded is None:
            return None
        info = state.candidates[row.attempt.candidate_id]
        return Best(
            candidate_id=row.attempt.candidate_id,
            label=info.label,
            numerics=info.numerics,
            purpose=row.attempt.purpose,
            speedup_vs_loaded=row.speedup_vs_loaded,
            tokens_per_second=row.attempt.tokens_per_second,
            gates=dict(state.winner["gates"]) if state.winner else {},
        )

    def attempts(self) -> pandas.DataFrame:
        """One row an attempt, in order; ratios are over the deployment as loaded, NaN where nothing was timed."""
        from cluster.tables import attempts_table

        return attempts_table(self.state)

    def plot(self, path: str | Path | None = None) -> matplotlib.figure.Figure:
        """Best so far over campaign time; written to `path` too when given."""
        from cluster.tables import plot_progress

        figure = plot_progress(self.state, self.plan)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def report(self) -> Path:
        """Write report.html from the log as it is now, and return its path."""
        from cluster.report import write_report

        return write_report(self.folder)

    def wait(self, timeout_seconds: float | None = None) -> Campaign:
        """Until a background campaign has ended; raises what ended it early. Returns at once for any other."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._error is not None:
                raise self._error
        return self

    def stop(self) -> Campaign:
        """Stop a background campaign as Ctrl-C would: what is being measured is finished, everything recorded, resumable."""
        if self._running is not None and self._thread is not None:
            self._running.halt.set()
            self._thread.join()
        return self

    def _start(self, running: Running) -> None:
        def work() -> None:
            try:
                run_campaign(running)
            except Interrupted:
                return
            except BaseException as error:
                self._error = error

        self._running = running
        self._thread = threading.Thread(target=work, name=f"campaign {self.folder.name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        best = self.leading
        leading = f"best {best.speedup_vs_loaded.value:.2f} × {best.label}" if best else "nothing faster yet"
        return f"<Campaign {self.folder}: {self.status}, {len(self.state.search_attempts())} attempts, {leading}>"

    def _repr_html_(self) -> str:
        from cluster.summary import summary_rows

        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(key)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for key, value in [
                ("campaign", str(self.folder)),
                ("status", self.status),
                *summary_rows(self.state, self.plan),
            ]
        )
        return f"<table>{rows}</table>"


def compile(
    model: str | None = None,
    traffic: str | None = None,
    budget: str | None = None,
    *,
    background: bool = False,
    quiet: bool = False,
    resume: str | Path | None = None,
    campaign_file: str | Path | None = None,
    **spec: Any,
) -> Campaign:
    """Search for a faster forward pass within a budget, verify it and release it, as `hotpass compile`.

    `spec` takes the fields of `cluster.spec.CampaignSpec`: concurrency, numerics, out, seed, threads, engine, ray, continue_from, …
    `resume` goes on with a folder and takes nothing else. With `background` the campaign runs in a thread and this returns at
    once. Raises InputError, MachineError, and Interrupted after Ctrl-C.
    """
    if resume is not None:
        plan = read_plan(Path(resume))
    else:
        given = {"model": model, "traffic": traffic, "budget": budget, **spec}
        plan = resolve(make_spec(given, str(campaign_file) if campaign_file else None))
    running = Running(plan=plan)
    running.view = make_view(plan, quiet=quiet or background)
    if background:
        from cluster.plan import write_plan

        write_plan(running.folder, plan)
        campaign = Campaign(running.folder)
        campaign._start(running)
        return campaign
    try:
        run_campaign(running)
    finally:
        running.view.close()
    return Campaign(running.folder)


def open_campaign(folder: str | Path) -> Campaign:
    """A campaign that exists, running or done."""
    return Campaign(folder)


def try_part(
    path: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    against: str | None = None,
    campaign: str | Path | Campaign | None = None,
    quiet: bool = False,
    **spec: Any,
) -> Tried:
    """One candidate through the search's own judge and gates, as `hotpass try`: a part's path, a candidate folder, or settings.

    On the deployment (and in the ledger) of `campaign`, or of `spec` (model, traffic, …). Raises InputError or MachineError.
    """
    if campaign is not None:
        plan = read_plan(campaign.folder if isinstance(campaign, Campaign) else Path(campaign))
    else:
        plan = resolve(make_spec({**spec, "baselines": False}), prefix="try")
    wanted: Candidate = make_wanted(
        str(path) if path is not None else None, _pairs(settings), _pairs(params), plan.deployment.model.dtype
    )
    running = Running(plan=plan, view=make_view(plan, quiet=quiet))
    try:
        return try_candidate(running, wanted, find_candidate(running.folder, against))
    finally:
        running.view.close()


def _pairs(values: Mapping[str, Any] | None) -> list[str]:
    return [f"{name}={value}" for name, value in (values or {}).items()]
