"""The builder as a server: makes what a candidate needs (libraries, derived weights, what torch.compile and Triton generate) before an
engine is asked to install it, so that no engine waits for a compiler. What it makes is kept by content in the cache that engines read.
"""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass, replace

from actors.spec import EngineSpec, make_builder, wider_bits
from engines.program import CandidateFailed
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Failure

BUILDS_AT_ONCE = 2
"""Where a builder is an actor: a build is mostly one thread, and on two cores the other would stand idle while an engine waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """How a build ended, and what it cost."""

    failure: Failure | None = None
    """Of kind build, or timeout at the deadline; None when everything is there."""
    seconds: float = 0.0
    """Of the wall clock."""
    core_seconds: float = 0.0
    """Of processors, in the processes that were started for it."""


class BuilderServer:
    """One builder on the machine of one engine. Holds nothing but what it was given. Several threads may build at a time."""

    def __init__(self, spec: EngineSpec, deployment: Deployment, deadline_seconds: float) -> None:
        self.spec = spec
        self.deadline_seconds = deadline_seconds
        self.deployment = deployment
        self._builder = None if spec.kind == "fake" else make_builder(spec, deployment)
        self._counting = threading.Lock()
        self._counted = _core_seconds()

    def build(self, candidate: Candidate) -> Built:
        """Everything that the candidate needs, or why it cannot be made."""
        start = time.monotonic()
        failure = None
        try:
            self._make(candidate, start + self.deadline_seconds)
        except CandidateFailed as failed:
            failure = failed.failure
        with self._counting:
            before, self._counted = self._counted, _core_seconds()
            return Built(
                failure=failure, seconds=time.monotonic() - start, core_seconds=max(0.0, self._counted - before)
            )

    def _make(self, candidate: Candidate, ends: float) -> None:
        from engines.build import CandidateBuilder

        builder = self._builder
        if builder is None:
            return
        files = builder.build(candidate, ends - time.monotonic()).parts if candidate.parts else ()
        if isinstance(builder, CandidateBuilder):
            builder.compile_ahead(candidate, files, ends - time.monotonic())

    def widen(self) -> None:
        """Build for the next deeper cuts from now on, as the engine does after its own `widen`."""
        wider = wider_bits(self.spec, self.deployment)
        if wider is not None:
            self.spec = replace(self.spec, narrowest_bits=wider)
            self._builder = None if self.spec.kind == "fake" else make_builder(self.spec, self.deployment)

    def has_compiler(self) -> bool:
        """Whether native parts can be built here; the fake builds nothing, so everything can be."""
        if self._builder is None:
            return True
        from engines.build import find_compiler

        return find_compiler() is not None

    def close(self) -> None:
        """Nothing is held open."""


def _core_seconds() -> float:
    """Of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
