"""What is foreseen is built while engines load and beside a build that an engine waits for; never beside a measurement."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from actors.builder import BuilderServer, Built
from actors.engine import EngineServer, Measured
from cluster.building import Foreseen
from cluster.campaign import run_campaign
from cluster.events import read_events
from cluster.journal import FOLDER
from cluster.machines import Machines, engine_spec
from cluster.plan import Plan
from cluster.ports import LocalBuilder, LocalEngine, View
from hotpass.errors import MachineError
from hotpass.records.candidate import Candidate, PartUse
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, Tier
from tests.cluster.campaigns import CLAIMS, fake, make_running, part

CANDIDATES = [Candidate(parts=(PartUse(source=part(name, child)),)) for name, child in CLAIMS.items()]


class Held:
    """A builder whose answers the test gives."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[tuple[Candidate, Future[Built]]] = queue.SimpleQueue()

    def submit(self, candidate: Candidate) -> Future[Built]:
        future: Future[Built] = Future()
        self.asked.put((candidate, future))
        return future

    def widen(self) -> None:
        return

    def close(self) -> None:
        return


def test_one_is_built_after_the_other_and_the_last_one_is_waited_for() -> None:
    builder = Held()
    foreseen = Foreseen(builder, CANDIDATES[:3])
    with foreseen.meanwhile() as built:
        candidate, first = builder.asked.get(timeout=60)
        assert candidate == CANDIDATES[0]
        assert builder.asked.empty()
        first.set_result(Built(core_seconds=1.0))
        candidate, second = builder.asked.get(timeout=60)
        assert candidate == CANDIDATES[1]
        second.set_exception(MachineError("the builder is gone"))
        candidate, third = builder.asked.get(timeout=60)
        assert candidate == CANDIDATES[2]
        threading.Timer(0.05, third.set_result, [Built(core_seconds=3.0)]).start()
    assert [item.core_seconds for item in built] == [1.0, 3.0]
    assert foreseen.next() is None


def test_two_cores_build_two_at_once() -> None:
    builder = Held()
    with Foreseen(builder, CANDIDATES[:3], at_once=2).meanwhile() as built:
        first, second = builder.asked.get(timeout=60), builder.asked.get(timeout=60)
        assert {first[0].id, second[0].id} == {candidate.id for candidate in CANDIDATES[:2]}
        assert builder.asked.empty()
        second[1].set_result(Built(core_seconds=2.0))
        third = builder.asked.get(timeout=60)
        first[1].set_result(Built(core_seconds=1.0))
        third[1].set_result(Built(core_seconds=3.0))
    assert sorted(item.core_seconds for item in built) == [1.0, 2.0, 3.0]


def test_a_build_beside_the_one_that_is_waited_for_ends_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first build of the search hangs until another one has begun beside it; that one ends a little later."""
    searching = threading.Event()
    seen: list[bool] = []
    beside: list[Future[Built]] = []

    class TwoAtOnce(LocalBuilder):
        held: Future[Built] | None = None

        def submit(self, candidate: Candidate) -> Future[Built]:
            if not searching.is_set() or beside:
                return super().submit(candidate)
            if self.held is None:
                self.held = Future()
                return self.held
            beside.append(Future())
            self.held.set_result(Built(seconds=2.0, core_seconds=2.0))
            threading.Timer(0.1, beside[0].set_result, [Built(seconds=1.0, core_seconds=1.5)]).start()
            return beside[0]

    class Watching(LocalEngine):
        def submit(self, assignment: Assignment) -> Future[Measured]:
            seen.extend(future.done() for future in beside)
            return super().submit(assignment)

    @contextlib.contextmanager
    def opened(plan: Plan, view: View) -> Iterator[Machines]:
        server = EngineServer(engine_spec(plan), lambda spec, deployment: fake())
        builder = TwoAtOnce(BuilderServer(server.spec, plan.deployment, 10.0))
        engine = Watching(server)
        loaded = engine.load

        def load(deployment: Deployment, tier: Tier) -> dict[str, float]:
            phases = loaded(deployment, tier)
            searching.set()
            return phases

        engine.load = load
        yield Machines(engines=[engine], builder=builder, build_ahead=False, compiler=True, builds_at_once=2)

    class Later(Foreseen):
        """Leaves everything for the search."""

        @contextlib.contextmanager
        def meanwhile(self) -> Iterator[list[Built]]:
            yield []

    monkeypatch.setattr(
        "cluster.campaign.foreseen_builds", lambda plan, machines, parts: Later(machines.builder, CANDIDATES[2:3])
    )
    run_campaign(replace(make_running(tmp_path / "c", max_attempts=4), open_machines=opened))
    assert beside
    assert seen
    assert all(seen)
    costs = [e.payload["build"] for e in read_events(tmp_path / "c" / FOLDER) if "build" in e.payload]
    assert costs[0] == {"seconds": 2.0, "core_seconds": 3.5}
