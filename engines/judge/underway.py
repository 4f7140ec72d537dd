"""One assignment under way: what has come of it so far, kept so that a failure in the middle loses nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engines.judge.disturbance import Alone, Disturbance
from engines.judge.inputs import InputSet
from engines.judge.rounds import Evidence, Place
from hotpass.records.measurement import (
    Assignment,
    CleanReport,
    Failure,
    MeasuredReplay,
    Pairing,
    ReloadReport,
    Side,
    TokenCheck,
)


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What has come of an assignment so far."""

    assignment: Assignment
    pairing: Pairing
    """How the sides live in this attempt."""
    started: float
    """On time.monotonic's clock; the deadline counts from here."""
    evidence: Evidence = field(default_factory=Evidence)
    replays: list[MeasuredReplay] = field(default_factory=list)
    reloads: list[ReloadReport] = field(default_factory=list)
    phases_ms: dict[str, float] = field(default_factory=dict)
    tokens: TokenCheck | None = None
    failure: Failure | None = None
    clean: CleanReport | None = None
    changed_while_installed: list[str] = field(default_factory=list)
    weights_unchanged: bool = True
    alone: Alone = field(default_factory=Alone)
    """The incumbent's windows with no candidate beside them."""
    disturbance: Disturbance = field(default_factory=Disturbance)
    noise_floor: float = 0.0
    late_rows: frozenset[int] = frozenset()
    """Rows that are measured only if the others do not give the candidate up; installs do not warm them."""
    pool: Mapping[Place, Sequence[InputSet]] | None = None
    """Input sets of this attempt alone; None for the engine's pool."""

    @property
    def deadline(self) -> float:
        return self.started + self.assignment.deadline_seconds

    @property
    def needs_more_than_declared(self) -> bool:
        """Whether the candidate's reload turned out costlier than it said; it is rejected for that, so that no window is worth its time."""
        return any(report.understated for report in self.reloads if report.side is Side.CANDIDATE)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases_ms[name] = self.phases_ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3
