"""What the campaign loop needs from the outside, as small interfaces, and their in-process form.

    EnginePort.submit(assignment) ─► Future[Measured]          BuilderPort.submit(candidate) ─► Future[Built]
    Proposer.ask() ─► Proposal | None                          View.changed(state), .activity(engine, text), .note(text)

The Ray form of the first two is `actors.remote`. Futures resolve in any order; an in-process port has answered when `submit` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from actors.builder import BuilderServer, Built
from actors.engine import EngineServer, Evidence, Measured
from cluster.state import CampaignState
from hotpass.records.candidate import Candidate, Proposal
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import (
    Assignment,
    Attempt,
    BaselineMeasurement,
    OutputCheck,
    Tier,
)
from hotpass.records.profile import Profile
from hotpass.records.shapes import ShapeRow
from hotpass.records.slots import SlotTable

T = TypeVar("T")


class EnginePort(Protocol):
    """One engine, wherever it lives. All but `submit` wait for their answer."""

    name: str

    def load(self, deployment: Deployment, tier: Tier) -> Mapping[str, float]: ...

    def slots(self) -> SlotTable: ...

    def facts(self) -> Mapping[str, Any]: ...

    def submit(self, assignment: Assignment) -> Future[Measured]: ...

    def baselines(self) -> Sequence[str]:
        """Names that `baseline` takes; empty for an engine that has none."""
        ...

    def baseline(
        self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float
    ) -> BaselineMeasurement: ...

    def noise(self) -> Sequence[OutputCheck]:
        """The reference against itself in another order; empty when the engine cannot say."""
        ...

    def evidence(self, candidate: Candidate, seed: int, noise_abs: float) -> Evidence:
        """What the release gates need beyond a measurement: greedy agreement on held-out text, weights hash."""
        ...

    def profile(self, assignment: Assignment) -> Profile | None:
        """Where the time of the assignment's candidate goes; None for an engine that cannot say."""
        ...

    def widen(self) -> Sequence[int]:
        """Load again with deeper cuts on the fast tier: their depths, or nothing when they are the whole model already."""
        ...

    def close(self) -> None: ...


class BuilderPort(Protocol):
    """Turns a candidate's sources into libraries, derived weights and compiled code, off the engine's time."""

    def submit(self, candidate: Candidate) -> Future[Built]:
        """Without a failure when it is built, or has nothing to build."""
        ...

    def widen(self) -> None:
        """Build for the deeper cuts that the engines have now."""
        ...

    def close(self) -> None: ...


class Proposer(Protocol):
    """Which candidate next. Told of every judged attempt of the search, in order."""

    @property
    def exhausted(self) -> str:
        """Why `ask` had nothing left; empty while it has."""
        ...

    @property
    def broken(self) -> Mapping[str, str]:
        """What is not proposed any more, since its candidates failed alike → how they failed."""
        ...

    @property
    def random_state(self) -> str:
        """What later draws follow from, given the same answers."""
        ...

    @property
    def space_version(self) -> str:
        """Hash of everything that may be chosen now."""
        ...

    def drain_borrowed(self) -> Sequence[str]:
        """Candidates that the control wanted since the last call, and whose attempts it was told: others had had them measured."""
        ...

    def sources(self) -> tuple[str, ...]:
        """Names that `ask` takes now, in the order in which they go when all have earned alike; empty when nothing is left."""
        ...

    def ask(self, incumbent: Candidate, source: str = "") -> Proposal | None:
        """None when that source (or, without one, everything) has nothing left to try."""
        ...

    def ask_serving(self, incumbent: Candidate) -> Proposal | None:
        """The incumbent with another setting of the serving loop, which only the slow tier can judge; None when none is left."""
        ...

    def seen(self, candidates: Iterable[Candidate]) -> None:
        """Candidates that others propose: never asked for here."""
        ...

    def tell(self, candidate: Candidate, attempt: Attempt) -> None: ...

    def give_up(self, candidate: Candidate) -> None:
        """No answer will come: its measurement was lost with the machine."""
        ...


class View(Protocol):
    """Where people look. None of these may raise or wait."""

    def changed(self, state: CampaignState) -> None: ...

    def activity(self, engine: str, text: str) -> None:
        """What an engine or a builder does now; empty when it is idle."""
        ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    """A view that shows nothing."""

    def changed(self, state: CampaignState) -> None:
        return

    def activity(self, engine: str, text: str) -> None:
        return

    def note(self, text: str) -> None:
        return

    def close(self) -> None:
        return


def answered(call: Callable[[], T]) -> Future[T]:
    """A future of a call made now; what it raises is the future's, except an interrupt, which is the caller's."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


class LocalEngine:
    """An engine server in this process."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.name = server.spec.name
        self.load = server.load
        self.slots = server.slots
        self.facts = server.facts
        self.baselines = server.baselines
        self.baseline = server.baseline
        self.noise = server.noise
        self.evidence = server.evidence
        self.profile = server.profile
        self.widen = server.widen
        self.close = server.close

    def submit(self, assignment: Assignment) -> Future[Measured]:
        return answered(lambda: self.server.measure(assignment))


class LocalBuilder:
    """A builder in this process."""

    def __init__(self, server: BuilderServer) -> None:
        self.server = server
        self.widen = server.widen
        self.close = server.close

    def submit(self, candidate: Candidate) -> Future[Built]:
        return answered(lambda: self.server.build(candidate))
