"""A campaign from plan to result: opens the log, starts engines, calibrates, searches, measures the finalists, writes what is read
afterwards. The only module that knows the whole order of things.

    plan ─► log (folded) ─► engines ─► A/A ─► baselines ─► search ─► finalists, gates ─► result.json, release/, report.html

A campaign that was interrupted or killed is run again by the same function on the same folder: the log says what is done.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.agents import brief_agents, keys_taken, open_agents
from cluster.briefing import write_briefing
from cluster.building import Foreseen
from cluster.clock import Clock, SimulatedClock, WallClock
from cluster.desk import CampaignDesk
from cluster.events import EventLog
from cluster.finish import measure_finalists, result_line
from cluster.floors import bounds_ms, suspect_ms
from cluster.folder import all_candidates
from cluster.intake import Intake
from cluster.journal import FOLDER, Journal
from cluster.ledger import Mirror, open_mirror
from cluster.loop import SearchLoop
from cluster.machines import Machines, MachinesOpener, num_engines, open_machines
from cluster.plan import FILE, Plan, write_plan
from cluster.ports import Proposer, Silent, View
from cluster.proposers import proposer_of, unfinished
from cluster.report import FILE as REPORT_FILE
from cluster.report import write_report
from cluster.runs import facts_of
from cluster.session import Hush, Session
from cluster.state import CampaignState, fold
from cluster.store import CandidateWriter, restored, set_torn_aside
from cluster.waiting import telling_waits
from cluster.warm import Warm, warm_of
from hotpass.errors import HotpassError
from hotpass.records.candidate import Numerics, PartSource
from search.agents.secret import Secret
from search.catalogue import load_catalogue
from search.inbox import Inbox
from search.proposers import needs_building

RESULT_FILE = "result.json"


class Interrupted(HotpassError):
    """The user stopped the campaign; everything acknowledged is recorded."""

    exit_code = 130


@contextlib.contextmanager
def _mirrored(plan: Plan, folder: Path, view: View) -> Iterator[Mirror]:
    """MLflow follows the log from behind; closed last, so that it has the result and the report too."""
    mirror = open_mirror(folder, facts_of(plan), tracking_uri=plan.spec.tracking_uri, note=view.note)
    try:
        yield mirror
    finally:
        mirror.close()


@dataclass(slots=True, kw_only=True)
class Running:
    """What a campaign holds open; `halt` may be set from another thread to stop it as Ctrl-C does."""

    plan: Plan
    view: View = field(default_factory=Silent)
    halt: threading.Event = field(default_factory=threading.Event)
    open_machines: MachinesOpener = open_machines
    catalogue: Callable[[str], Sequence[PartSource]] = load_catalogue
    """Device → the parts that may be proposed there."""
    mirrored: Callable[[Plan, Path, View], AbstractContextManager[Hush | None]] = _mirrored
    """What follows the log from behind, and stands still during measurements."""
    desk: Callable[[Path], CampaignDesk] = CampaignDesk
    """What answers agents; travels to an actor where there is Ray."""
    llm_keys: Mapping[str, Secret] = field(default_factory=dict)
    """Of LLM providers; taken out of the environment when the campaign begins."""
    _store: CandidateWriter | None = None

    @property
    def folder(self) -> Path:
        return Path(self.plan.spec.out)

    @property
    def store(self) -> CandidateWriter:
        """Of candidates; the journal makes the sources durable before the events that name them."""
        if self._store is None:
            self._store = CandidateWriter(self.folder)
        return self._store


def run_campaign(running: Running) -> dict[str, Any]:
    """Run or resume a campaign until its result, which is returned and is in `result.json`.

    Raises Interrupted after Ctrl-C (or `halt`), InputError when another process writes the folder, MachineError.
    """
    with opened_log(running) as (log, state):
        if state.result is not None:
            return _finished(running, state)
        warm_of(running.plan, running.folder)  # what cannot be started from is said before any engine is
        journal = _journal(running, log, state)
        try:
            with keys_taken(running.plan) as running.llm_keys, opened_session(running, journal) as (session, machines):
                return _run(session, machines, running)
        except KeyboardInterrupt:
            journal.decide("interrupted")
            journal.settle()
            raise Interrupted(
                f"stopped after {len(state.search_attempts())} attempts, all recorded; "
                f"go on with: hotpass compile --resume {running.folder}"
            ) from None


@contextlib.contextmanager
def opened_log(running: Running) -> Iterator[tuple[EventLog, CampaignState]]:
    """The folder's log for writing, and its state so far. Raises InputError when another process writes it."""
    with EventLog.open(running.folder / FOLDER) as log:
        if not (running.folder / FILE).exists():
            write_plan(running.folder, running.plan)
        for path in log.quarantined:
            running.view.note(
                f"a torn last line of the event log was put aside as {path}; nothing acknowledged is lost"
            )
        state = fold(log.read())
        for path in set_torn_aside(running.folder, state.candidates):
            running.view.note(f"a candidate that was being written when the machine stopped was put aside as {path}")
        proposals = (event.payload for event in log.read() if event.kind == "proposal")
        for path in restored(running.folder, proposals):
            running.view.note(f"a candidate whose folder was not whole was made again from the log as {path}")
        yield log, state


@contextlib.contextmanager
def opened_journal(running: Running) -> Iterator[Journal]:
    """The folder's journal, for whoever records single attempts in it."""
    with opened_log(running) as (log, state):
        yield _journal(running, log, state)


@contextlib.contextmanager
def opened_session(running: Running, journal: Journal) -> Iterator[tuple[Session, Machines]]:
    """Engines loaded and calibrated, closed again whatever happens; MLflow mirrors the log meanwhile."""
    plan, folder = running.plan, running.folder
    with contextlib.ExitStack() as stack:
        mirror = stack.enter_context(running.mirrored(plan, folder, running.view))
        machines = stack.enter_context(running.open_machines(plan, running.view))
        names = [engine.name for engine in machines.engines]
        view = stack.enter_context(telling_waits(running.view, plan.deployment.hardware.device, plan.spec.out, names))
        session = Session(
            plan,
            journal,
            machines.engines,
            view,
            store=running.store.save,
            bounds_ms=bounds_ms(plan.deployment),
            suspect_ms=suspect_ms(plan.deployment, Numerics(plan.spec.numerics)),
            hush=mirror,
        )
        session.candidates |= all_candidates(folder)
        running.view.changed(journal.state)
        session.start(foreseen_builds(plan, machines, running.catalogue))
        assert session.slot_table is not None
        write_briefing(folder, session.slot_table, machines.compiler)
        yield session, machines


def foreseen_builds(plan: Plan, machines: Machines, catalogue: Callable[[str], Sequence[PartSource]]) -> Foreseen:
    """What will be tried first: the engines' load leaves a builder time for it."""
    deployment = plan.deployment
    wanted = needs_building(
        catalogue(deployment.hardware.device),
        deployment,
        allowed=Numerics(plan.spec.numerics),
        compiler=machines.compiler,
    )
    return Foreseen(machines.builder, wanted, at_once=machines.builds_at_once)


def _finished(running: Running, state: CampaignState) -> dict[str, Any]:
    """The result of a campaign that is over. Its last process may have died before everything was written out and mirrored."""
    assert state.result is not None
    folder, result = running.folder, dict(state.result)
    with running.mirrored(running.plan, folder, running.view):
        if not (folder / REPORT_FILE).is_file():  # the last thing that is written
            write_outputs(folder, running.plan, state, result)
    return result


def _run(session: Session, machines: Machines, running: Running) -> dict[str, Any]:
    plan = session.plan
    if plan.spec.baselines:
        session.measure_baselines()
    if not session.state.stop_reason:
        proposer = make_proposer(session, machines, running.catalogue, warm_of(plan, running.folder))
        brief_agents(session, running.folder)
        with open_agents(plan, running.view, running.llm_keys, desk=running.desk) as expecting:
            loop = SearchLoop(
                session,
                proposer,
                machines.builder,
                build_ahead=machines.build_ahead,
                foreseen=session.foreseen if machines.builds_at_once > 1 else None,
                first=unfinished(session.plan, session.state, session.candidates),
                halt=running.halt,
                intake=Intake(Inbox(running.folder), session.journal, session.keep),
                expecting=expecting,
            )
            loop.run()
    measure_finalists(session)
    result = result_line(session)
    session.journal.decide("result", result=result)
    session.journal.settle()
    write_outputs(running.folder, plan, session.state, result)
    return result


def make_proposer(
    session: Session, machines: Machines, catalogue: Callable[[str], Sequence[PartSource]], warm: Warm
) -> Proposer:
    """The built-in proposer, with its control where one is asked for, told everything that the log remembers."""
    plan = session.plan
    assert session.slot_table is not None
    proposer = proposer_of(
        plan,
        session.state,
        session.candidates,
        session.slot_table,
        catalogue(plan.deployment.hardware.device),
        machines.compiler,
        warm,
    )
    proposer.seen(
        proposal.candidate for proposal in unfinished(session.plan, session.state, session.candidates).values()
    )
    return proposer


def write_outputs(folder: Path, plan: Plan, state: CampaignState, result: Mapping[str, Any]) -> None:
    """result.json, the release folder when there is a winner, and the report."""
    from cluster.release import write_release

    (folder / RESULT_FILE).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if state.best() is not None:
        write_release(folder, plan, state)
    write_report(folder)


def _journal(running: Running, log: EventLog, state: CampaignState) -> Journal:
    return Journal(log, state, _clock(running.plan, state), running.view, files=running.store.sync)


def _clock(plan: Plan, state: CampaignState) -> Clock:
    if plan.spec.engine == "fake":
        return SimulatedClock(state.elapsed_seconds, num_engines(plan))
    return WallClock(state.elapsed_seconds)
