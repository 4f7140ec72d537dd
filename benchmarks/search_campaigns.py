"""Campaigns on fake engines for `bench_search`: engines that take real time, threads that think for a while, a wide space of parts.

Nothing here is measured on a model: the engine's answers are simulated; what is real is the driver, the log, the disk and the clock.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from actors.builder import BuilderServer
from actors.engine import EngineServer, Measured
from actors.spec import EngineSpec
from cluster.campaign import Running
from cluster.clock import WallClock
from cluster.events import EventLog
from cluster.intake import Intake
from cluster.journal import FOLDER, Journal
from cluster.loop import SearchLoop
from cluster.plan import Plan, pace_for, write_plan
from cluster.ports import BuilderPort, EnginePort, LocalBuilder, LocalEngine, Silent, View
from cluster.proposers import proposer_of
from cluster.resolve import CAMPAIGNS, simulated_hardware, simulated_model
from cluster.session import Session
from cluster.spec import CampaignSpec
from cluster.state import CampaignState, fold
from cluster.store import CandidateWriter
from engines.fake import FakeEngine
from hotpass.canonical import content_hash
from hotpass.records.candidate import Candidate, PartSource, PartUse, Proposal
from hotpass.records.deployment import Deployment, Serving, TrafficRef
from hotpass.records.measurement import Assignment, Stopping
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from search.inbox import Inbox

PLACES = ("mlp", "self_attn", "input_layernorm", "post_attention_layernorm")
PARTS_PER_PLACE = 6
ROW = ShapeRow(
    phase=Phase.DECODE, num_seqs=2, query_tokens=2, context_mean=256, context_max=512, steps_share=1.0, tokens_share=1.0
)


def part(name: str, child: str) -> PartSource:
    """A part with twelve combinations of parameters; its code is never run."""
    text = (
        "from hotpass import part\n\n\n"
        f"@part(engine='decoder', claims=['model.layers.*.{child}'], params={{'tile': [8, 16, 32, 64], 'unroll': [1, 2, 4]}})\n"
        f"class Part:\n    '''{name}: does less in {child}.'''\n\n    def forward(self, *args):\n        return args[0]\n"
    )
    return PartSource(name=name, files=(("part.py", text),))


PARTS = tuple(part(f"{child}-{index}", child) for child in PLACES for index in range(PARTS_PER_PLACE))


def step_ms(candidate: Candidate, row: ShapeRow) -> float:
    """20 ms, times a factor from 0.9 to 1.05 for each part with its parameters, by their hash."""
    factor = 1.0
    for use in candidate.parts:
        factor *= 0.9 + 0.15 * int(content_hash([use.source.name, dict(use.params)])[:6], 16) / 16**6
    return 20.0 * factor


def bench_plan(folder: Path, **fields: object) -> Plan:
    """A plan by hand: one row, three to eight rounds an attempt."""
    asked = {"model": "fake", "traffic": "by-hand", "engine": "fake", "ray": False, "baselines": False, **fields}
    spec = CampaignSpec(**{**asked, "out": str(folder)})  # type: ignore[arg-type]
    traffic = TrafficRef(
        name="by-hand", source_format="preset", content_hash="0" * 64, num_requests=1, dropped={}, content_valid=False
    )
    deployment = Deployment(
        model=simulated_model("fake"),
        traffic=traffic,
        hardware=simulated_hardware(),
        serving=Serving(engine="simulated"),
        concurrency=1,
        shapes=ShapeTable(rows=(ROW,), concurrency=1, chunk_tokens=512, num_steps=100, output_tokens_per_step=1.0),
    )
    rounds = Stopping(alpha=0.02, min_rounds=3, max_rounds=8)
    pace = replace(pace_for(spec.budget_seconds), fast=rounds, slow=rounds, own=rounds, reserve_seconds=0.0)
    return Plan(
        campaign=folder.name,
        created="2026-12-01T00:00:00+00:00",
        spec=spec,
        deployment=deployment,
        pace=pace,
        versions={},
    )


class PacedEngine(LocalEngine):
    """A fake engine whose answers take real time, and that notes when it was busy."""

    def __init__(self, server: EngineServer, seconds: float) -> None:
        super().__init__(server)
        self.seconds = seconds
        self.busy: list[tuple[float, float]] = []

    def submit(self, assignment: Assignment) -> Future[Measured]:
        future: Future[Measured] = Future()
        began = time.monotonic()

        def answer() -> None:
            measured = self.server.measure(assignment)
            self.busy.append((began, time.monotonic()))
            future.set_result(measured)

        timer = threading.Timer(self.seconds, answer)
        timer.daemon = True
        timer.start()
        return future

    def busy_share(self, since: float, until: float) -> float:
        """Of that time, as far as its orders were answered by then."""
        inside = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self.busy)
        return inside / (until - since)


@dataclass(slots=True, kw_only=True)
class Thinker:
    """An agent as the loop sees it: every so many seconds a new candidate in the inbox, or never one. No LLM is asked."""

    inbox: Inbox
    name: str
    seconds: float
    dead: bool = False
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        draw, number = random.Random(self.name), 0
        while not self.stop.wait(self.seconds):
            if self.dead:
                continue
            number += 1
            # A reply of the length that agents are asked for: a part of their own in a few variants.
            for use in self._reply(draw, number):
                candidate = Candidate(parts=(use,))
                self.inbox.submit(
                    Proposal(candidate=candidate, proposer=self.name), self.name, f"{number}-{candidate.short_id}"
                )

    def _reply(self, draw: random.Random, number: int) -> list[PartUse]:
        source = part(f"{self.name.replace(':', '-')}-{number}", draw.choice(PLACES))
        return [PartUse(source=source, params={"tile": 8 << index, "unroll": 1}) for index in range(4)]


class Growth(Silent):
    """A view that notes the memory of this process with every so many attempts of the search, and says so on stderr."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[tuple[int, float]] = []
        """(attempts, resident MB)."""
        self._process = psutil.Process()

    def changed(self, state: CampaignState) -> None:
        attempts = state.tally.searched
        if attempts % self.every == 0 and attempts > (self.seen[-1][0] if self.seen else 0):
            self.seen.append((attempts, self._process.memory_info().rss / 2**20))
            print(f"{attempts} attempts, {self.seen[-1][1]:.0f} MB", file=sys.stderr, flush=True)

    def slope_kb(self) -> float | None:
        """Per attempt from the first note to the last; None with fewer than two."""
        if len(self.seen) < 2:
            return None
        (first, before), (last, after) = self.seen[0], self.seen[-1]
        return round((after - before) * 1024 / (last - first), 2)


@contextlib.contextmanager
def thinking(folder: Path, count: int, seconds: float, *, dead: bool = False) -> Iterator[None]:
    """So many agents at work; they begin at different moments, as real ones do."""
    inbox = Inbox(folder)
    thinkers = [Thinker(inbox=inbox, name=f"agent:{index}", seconds=seconds, dead=dead) for index in range(count)]
    threads = [threading.Thread(target=thinker.run, daemon=True) for thinker in thinkers]
    for thread in threads:
        time.sleep(seconds / max(1, count) / 4)
        thread.start()
    try:
        yield
    finally:
        for thinker in thinkers:
            thinker.stop.set()
        for thread in threads:
            thread.join()


@dataclass(slots=True, kw_only=True)
class Ran:
    """A search that is over."""

    state: CampaignState
    engines: list[EnginePort]
    seconds: float
    """Of the search alone, by the wall clock."""
    began: float
    """Monotonic."""


def run_search(
    folder: Path,
    plan: Plan,
    engines: list[EnginePort],
    *,
    build_ahead: bool,
    agents_alive: bool = False,
    view: View | None = None,
) -> Ran:
    """The search of a campaign, from A/A to its stop; no baselines, no finalists, no MLflow, no report."""
    write_plan(folder, plan)
    with EventLog.open(folder / FOLDER) as log:
        store = CandidateWriter(folder)
        view = view or Silent()
        journal = Journal(log, fold(log.read()), WallClock(), view, files=store.sync)
        session = Session(plan, journal, engines, view, store=store.save)
        session.start()
        slots = session.slot_table
        assert slots is not None
        began = time.monotonic()
        loop = SearchLoop(
            session,
            proposer_of(plan, session.state, session.candidates, slots, PARTS, compiler=True),
            builder_for(plan),
            build_ahead=build_ahead,
            intake=Intake(Inbox(folder), journal, session.keep),
            expecting=lambda: agents_alive,
        )
        loop.run()
        return Ran(state=session.state, engines=engines, seconds=time.monotonic() - began, began=began)


def builder_for(plan: Plan) -> BuilderPort:
    return LocalBuilder(BuilderServer(EngineSpec(kind="fake", name="builder"), plan.deployment, 10.0))


def fake_engines(count: int, seconds: float | None = None) -> list[EnginePort]:
    """In this process; in real time where `seconds` is given."""
    servers = [
        EngineServer(
            EngineSpec(kind="fake", name=f"fake-{index}"),
            lambda spec, deployment: FakeEngine(
                spec.name,
                step_time=step_ms,
                seed=int(spec.name.split("-")[1]),
                logit_error=lambda c: 1e-5 if c.parts else 0.0,
            ),
        )
        for index in range(count)
    ]
    return [LocalEngine(server) if seconds is None else PacedEngine(server, seconds) for server in servers]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for a campaign, on the disk that campaigns are on, gone afterwards."""
    CAMPAIGNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=CAMPAIGNS) as folder:
        yield Path(folder) / "campaign"


def whole_campaign(folder: Path, plan: Plan, engines: list[EnginePort]) -> Running:
    """The same as a campaign that `run_campaign` runs to its result."""
    from cluster.machines import Machines

    @contextlib.contextmanager
    def opened(plan: Plan, view: object) -> Iterator[Machines]:
        yield Machines(engines=engines, builder=builder_for(plan), build_ahead=False, compiler=True)

    return Running(plan=plan, open_machines=opened, catalogue=lambda device: PARTS)
