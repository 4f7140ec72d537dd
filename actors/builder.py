"""The builder as a server: makes what a candidate's parts need (libraries, derived weights) before an engine is asked to install
it, so that no engine waits for a compiler. What it makes is kept by content in the cache that engines read.
"""

from __future__ import annotations

from dataclasses import replace

from actors.spec import EngineSpec, make_builder, wider_bits
from engines.program import CandidateFailed
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Failure


class BuilderServer:
    """One builder on the machine of one engine. Holds nothing but what it was given."""

    def __init__(self, spec: EngineSpec, deployment: Deployment, deadline_seconds: float) -> None:
        self.spec = spec
        self.deadline_seconds = deadline_seconds
        self.deployment = deployment
        self._builder = None if spec.kind == "fake" else make_builder(spec, deployment)

    def build(self, candidate: Candidate) -> Failure | None:
        """None when everything is there; the candidate's Failure (kind build, or timeout) otherwise."""
        if self._builder is None or not candidate.parts:
            return None
        try:
            self._builder.build(candidate, self.deadline_seconds)
        except CandidateFailed as failed:
            return failed.failure
        return None

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
