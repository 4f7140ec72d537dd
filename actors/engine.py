"""The engine as a server: a plain class that owns one engine, takes the measuring lease around each measurement, and can be
used in-process or, wrapped last, as a Ray actor. Replies are records of numbers (well below 1 MB); no tensor leaves it.

    load once ─► slots ─► measure(assignment) ─► Measured(result, wait_seconds)
                          baseline(name, …) ─► BaselineMeasurement      evidence(candidate, …) ─► Evidence (for the release gates)
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from actors.lease import MeasuringLease
from actors.spec import EngineMaker, EngineSpec, cuts_of, make_engine, wider_bits
from engines.program import CandidateFailed
from engines.protocol import Engine, MeasuresBaselines, Profiles
from hotpass.errors import EngineDied
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import (
    Agreement,
    Assignment,
    BaselineMeasurement,
    MeasureResult,
    OutputCheck,
    Tier,
)
from hotpass.records.profile import Profile
from hotpass.records.shapes import ShapeRow
from hotpass.records.slots import SlotTable

TEXTS, TOKENS_PER_TEXT = 4, 96
"""Held-out text that the greedy gate scores: long enough that one wrong position in a hundred shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A result and what it waited for."""

    result: MeasureResult
    domain: str
    """Memory-bandwidth domain that it was measured in."""
    wait_seconds: float
    """Spent waiting for the measuring lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the release gates need beyond a measurement. None: this engine cannot say."""

    agreement: Agreement | None
    weights_unchanged: bool | None
    problem: str = ""
    """Why the candidate could not be scored; empty when it was."""


class EngineServer:
    """One engine. Methods are called one at a time."""

    def __init__(self, spec: EngineSpec, make: EngineMaker = make_engine) -> None:
        """`make` is asked for an engine at each load."""
        self.spec = spec
        self.domain = f"{spec.device}{spec.visible_devices or ''}"
        self._make = make
        self._deployment: Deployment | None = None
        self._engine: Engine | None = None

    def load(self, deployment: Deployment, tier: Tier) -> dict[str, float]:
        """Start-up time by phase, ms. Raises InputError or MachineError."""
        self.close()
        self._deployment = deployment
        self._engine = self._make(self.spec, deployment)
        with self._lease():
            return dict(self._engine.load(deployment, tier))

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineDied(f"{self.spec.name} is not loaded")
        return self._engine

    def slots(self) -> SlotTable:
        return self.engine.slots()

    def measure(self, assignment: Assignment) -> Measured:
        """An engine that died (not a candidate of it) is made and loaded again, once, before the error goes up."""
        engine = self.engine
        with self._lease() as lease:
            try:
                result = engine.measure(assignment)
            except EngineDied:
                self._again(assignment.tier)
                result = self.engine.measure(assignment)
        return Measured(result=result, domain=self.domain, wait_seconds=lease.wait_seconds if lease else 0.0)

    def baselines(self) -> tuple[str, ...]:
        """What `baseline` can measure; empty for an engine without such sides."""
        able = self._able()
        return tuple(able.baselines()) if able else ()

    def baseline(self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float) -> BaselineMeasurement:
        able = self._able()
        assert able is not None, "asked for a baseline that `baselines` does not name"
        with self._lease():
            return able.measure_baseline(name, rows, seed, deadline_seconds)

    def noise(self) -> tuple[OutputCheck, ...]:
        """The reference against itself in another order; empty when the engine cannot say."""
        able = self._able()
        return tuple(able.reference_noise()) if able else ()

    def evidence(self, candidate: Candidate, seed: int, noise_abs: float) -> Evidence:
        """Greedy agreement on held-out text and the full hash of the weights."""
        able = self._able()
        if able is None:
            return Evidence(agreement=None, weights_unchanged=None)
        try:
            agreement = able.score(candidate, TEXTS, TOKENS_PER_TEXT, seed, noise_abs)
        except CandidateFailed as failed:
            return Evidence(agreement=None, weights_unchanged=able.verify_weights(), problem=failed.failure.message)
        return Evidence(agreement=agreement, weights_unchanged=able.verify_weights())

    def profile(self, assignment: Assignment) -> Profile | None:
        """Where the time of the assignment's candidate goes; None for an engine that cannot say."""
        engine = self.engine
        if not isinstance(engine, Profiles):
            return None
        with self._lease():
            return engine.profile(assignment)

    def widen(self) -> tuple[int, ...]:
        """Load again with the next deeper cuts on the fast tier. Their depths; nothing when the whole model is measured already."""
        assert self._deployment is not None
        wider = wider_bits(self.spec, self._deployment)
        if wider is None:
            return ()
        self.spec = replace(self.spec, narrowest_bits=wider)
        with self._lease():
            self._again(Tier.FAST)
        return tuple(len(cut) for cut in cuts_of(self.spec, self._deployment))

    def _able(self) -> MeasuresBaselines | None:
        return cast(MeasuresBaselines, self.engine) if hasattr(self.engine, "measure_baseline") else None

    def _lease(self) -> AbstractContextManager[MeasuringLease | None]:
        """The fake takes none: it keeps nobody's memory bus busy."""
        if self.spec.kind == "fake":
            return nullcontext()
        return MeasuringLease(self.domain, holder=f"{self.spec.name} of {self.spec.campaign or 'no campaign'}")

    def _again(self, tier: Tier) -> None:
        assert self._deployment is not None
        self.engine.close()
        self._engine = self._make(self.spec, self._deployment)
        self._engine.load(self._deployment, tier)

    def facts(self) -> dict[str, Any]:
        """What must agree between nodes, and what is recorded of this process."""
        return node_facts() | {
            "engine": self.spec.name,
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        }

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def node_facts() -> dict[str, Any]:
    """Versions and place of the process that calls it, without importing torch."""
    import hotpass

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "ray": _installed("ray"),
        "torch": _installed("torch"),
        "hotpass": hotpass.__version__,
    }


@lru_cache(maxsize=16)
def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
